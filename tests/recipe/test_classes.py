"""The number of classes comes from the prepared folder; tests/messages has the refusals of other numbers."""

import shutil
from contextlib import nullcontext

import pytest

from tests.conftest import ROOT
from widemix.errors import InputError
from widemix.formats.manifest import manifest_json, read_manifest
from widemix.recipe import fill_classes, load_recipe, match_folder, run_differences

PATH = ROOT / "recipes/base/own_images.yaml"


def recipe(folder, classes=None, **keys):
    given = {"data.path": str(folder), "data.eval_split": "test", **keys}
    return load_recipe(PATH, [*given.items(), *([] if classes is None else [("data.num_classes", str(classes))])])


def test_they_are_those_of_the_folder(digits):
    for fill in (fill_classes, match_folder):
        assert fill(recipe(digits)).data.num_classes == 10
    assert match_folder(recipe(digits, 10)).data.num_classes == 10
    assert fill_classes(recipe(digits, 1000)).data.num_classes == 1000


@pytest.fixture
def of_classes(digits, tmp_path):
    """of_classes(n): the digits, prepared with so many of the classes."""

    def made(count):
        manifest = read_manifest(shutil.copytree(digits, tmp_path / "data"))
        fewer = manifest.model_copy(update={"classes": manifest.classes[:count]})
        (tmp_path / "data/manifest.json").write_text(manifest_json(fewer))
        return tmp_path / "data"

    return made


def test_one_class_is_nothing_to_learn(of_classes):
    """Training ended with a traceback at its first evaluation, an epoch later."""
    folder = of_classes(1)
    for classes in (None, 1):
        with pytest.raises(InputError, match=rf"^{folder}: has one class, '0'"):
            match_folder(recipe(folder, classes))
    of_numbers = {"data.targets": "regression", "train.loss": "mse", "train.keep_best": "mae"}
    of_numbers |= {"augment.smoothing": "0", "augment.cutmix": "0"}
    assert match_folder(recipe(folder, **of_numbers)).data.num_classes == 1


@pytest.mark.parametrize(("classes", "right"), [(5, False), (6, True)])
def test_the_best_of_five_needs_more_classes(of_classes, classes, right):
    best = recipe(of_classes(classes), **{"train.keep_best": "top5"})
    with nullcontext() if right else pytest.raises(InputError, match=r"top5: .* has 5 classes; take top1"):
        match_folder(best)


def test_the_folders_number_is_no_other_recipe(digits):
    assert run_differences(recipe(digits, 10), recipe(digits)) == []
    assert run_differences(recipe(digits, 10), recipe(digits, 11)) == ["data.num_classes"]


def test_a_run_records_it(train, tmp_path):
    code, output = train("run", "--data.num_classes", "0", "--train.max_steps", "1").wait()
    assert code == 0, output
    assert load_recipe(tmp_path / "run/recipe.yaml").data.num_classes == 10
