"""Parts of train: nested, stratified, apart from what is held out; and the order in which train is stored."""

import shlex
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.data_prep.test_adopt import main
from widemix.data_prep.prepare import prepare, select
from widemix.data_prep.samples import Dataset, ImageFiles
from widemix.data_prep.settings import PrepSettings, parse_fraction
from widemix.data_prep.sources import image_folder
from widemix.data_prep.subset import stratified_order
from widemix.data_prep.verify import repair_command
from widemix.errors import InputError
from widemix.formats.beton import open_beton
from widemix.formats.manifest import read_manifest

pytestmark = pytest.mark.usefixtures("small_pages")


def dataset(*sizes, **changes):
    """A dataset of as many samples a class as are asked for."""
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    names = [f"train/{label}/{i}" for i, label in enumerate(labels)]
    splits = {"train": ImageFiles("", names, labels), "val": ImageFiles("", ["v"], [0])}
    return replace(Dataset(tuple(map(str, range(len(sizes)))), splits), **changes)


def of_train(names, labels, **more):
    return Dataset(("a", "b"), {"train": ImageFiles("", list(names), labels)}, **more)


def names(whole, split="train", **settings):
    return [sample.name for sample in select(whole, PrepSettings(**settings)).splits[split]]


NUMBERS = of_train("abcd", [-1] * 4, targets=True)
OWN = dataset(20, splits={"train": dataset(20).splits["train"], "holdout": dataset(1).splits["val"]})
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=6)
fractions = st.floats(0.05, 1)


@given(sizes, fractions, fractions, st.floats(0, 0.5), st.integers(0, 3))
def test_fractions_are_nested_stratified_and_apart_from_the_holdout(sizes, one, other, holdout, seed):
    whole, total = dataset(*sizes), sum(sizes)
    shares = sorted((one, other))
    assume(not holdout or round(holdout * total))
    assume(round(shares[0] * (total - round(holdout * total))))
    cuts = [select(whole, PrepSettings(fraction=share, holdout=holdout, seed=seed)).splits for share in shares]
    small, large = ([sample.name for sample in cut["train"]] for cut in cuts)
    listed = names(whole)
    assert set(small) <= set(large)
    assert small == [name for name in listed if name in set(small)]  # in the source's order
    held = [sample.name for sample in cuts[0].get("holdout", ())]
    assert len(held) == round(holdout * total)
    assert [len(small), len(large)] == [round(share * (total - len(held))) for share in shares]
    assert not set(held) & set(large)
    for part in (small, large, held):
        got = [sum(name.startswith(f"train/{label}/") for name in part) for label in range(len(sizes))]
        least = max((count - 1) / size for count, size in zip(got, sizes, strict=True))
        most = min((count + 1) / size for count, size in zip(got, sizes, strict=True))
        assert least <= most  # one fraction of every class, to within a sample
    assert cuts[0]["val"] is whole.splits["val"]


def test_another_seed_takes_others_and_a_new_file_hardly_any():
    one, other = (set(names(dataset(500), fraction=0.1, seed=seed)) for seed in (0, 1))
    assert len(one & other) < 20
    assert len(set(names(dataset(500), fraction=0.2)) & set(names(dataset(501), fraction=0.2))) >= 99


def test_choice_and_order_of_a_seed_are_always_the_same():
    """Whatever the versions of libraries: a folder that is prepared again, or extended, is the same."""
    whole = dataset(5, 3)
    shuffled = [f"train/{n}" for n in ("1/6", "1/7", "0/0", "0/1", "0/3", "0/4", "1/5", "0/2")]
    assert names(whole, shuffle=True, seed=3) == shuffled
    most = {"fraction": 0.7, "holdout": 0.25, "seed": 3}
    assert names(whole, **most) == ["train/0/0", "train/0/2", "train/0/3", "train/1/5"]
    assert names(whole, "holdout", **most) == ["train/0/1", "train/1/7"]
    assert names(whole, per_class=1, seed=3) == ["train/0/2", "train/1/5"]


def test_names_of_any_bytes_are_chosen_too():
    whole = of_train([f"a\udcff/{i}" for i in range(8)], [0] * 4 + [1] * 4)
    settings = {"fraction": 0.5, "holdout": 0.25, "shuffle": True}
    assert [len(names(whole, split, **settings)) for split in ("train", "holdout")] == [3, 2]


@pytest.mark.parametrize(
    ("sizes", "labels"), [((1, 3), [1, 0, 1, 1]), ((3, 1), [0, 0, 1, 0]), ((2, 4), [1, 0, 1, 1, 0, 1])]
)
def test_each_head_of_the_order_has_all_classes(sizes, labels):
    train = dataset(*sizes).splits["train"]
    assert [train[index].label for index in stratified_order(train, 0)] == labels


def test_the_holdout_has_the_sources_order():
    settings, listed = {"holdout": 0.5, "shuffle": True}, names(dataset(20, 20))
    held, chosen = (names(dataset(20, 20), split, **settings) for split in ("holdout", "train"))
    assert held == [name for name in listed if name in set(held)]
    assert chosen != [name for name in listed if name in set(chosen)]
    checked = dataset(20, check_files=lambda: ({"file": "x", "rule": "y"},))
    assert select(checked, PrepSettings(**settings)).check_files() != ()
    assert select(checked, PrepSettings(splits="train", part="1/2")).check_files() == ()


def test_per_class_is_nested_and_exact():
    whole = dataset(20, 30, 9)
    assert set(names(whole, per_class=5)) <= set(names(whole, per_class=9))
    nine = select(whole, PrepSettings(per_class=9)).splits["train"]
    assert np.bincount([sample.label for sample in nine]).tolist() == [9, 9, 9]
    assert len(names(NUMBERS, fraction=0.5, holdout=0.25)) == 2
    assert names(OWN, "holdout", fraction=0.5) == ["v"]


def test_fractions():
    assert [parse_fraction(text) for text in ("1%", "0.01", "100%")] == [0.01, 0.01, 1]
    for wrong in ("", "%", "one"):
        with pytest.raises(InputError, match="not a fraction"):
            parse_fraction(wrong)


@pytest.mark.parametrize(
    "whole",
    [
        dataset(4),  # one class
        of_train("ab", [1, 1]),
        of_train("xyz", [0, 1, 0]),  # no class after the other
        of_train("xy", [1, 0]),
        of_train("ab", [-1, -1], targets=True),
        dataset(4, 4, text=True),
    ],
)
def test_what_is_not_listed_class_by_class_is_not_shuffled(whole):
    listed = [sample.name for sample in whole.splits["train"]]
    assert all(names(whole, shuffle=True, seed=seed) == listed for seed in range(3))


def content(beton, sample):
    return beton.label[sample], beton.bytes[beton.offset[sample] :][: beton.size[sample]].tobytes()


def test_train_is_stored_shuffled(tmp_path, folder):
    listed = [names(image_folder.read(folder), seed=seed, shuffle=True) for seed in (0, 1)]
    plain = names(image_folder.read(folder), shuffle=False)
    assert [sorted(found) for found in listed] == [plain, plain] == [sorted(plain)] * 2
    assert len({*map(tuple, listed), tuple(plain)}) == 3
    for chosen in (True, False):
        manifest = prepare("image-folder", folder, tmp_path / str(chosen), PrepSettings(shuffle=chosen), processes=1)
        assert manifest.settings["shuffle"] is chosen
    shuffled, sorted_ = (open_beton(tmp_path / name / "train.beton") for name in ("True", "False"))
    for sample, name in enumerate(listed[0]):
        assert content(shuffled, sample) == content(sorted_, plain.index(name))
    assert np.array_equal(open_beton(tmp_path / "True" / "val.beton").label, [0, 0, 1, 1, 2, 2])


def test_a_chosen_set_of_splits(tmp_path, folder):
    prepare("image-folder", folder, tmp_path / "all", PrepSettings(), processes=1)
    settings = PrepSettings(splits="val")
    manifest = prepare("image-folder", folder, tmp_path / "val", settings, processes=1)
    assert list(manifest.splits) == ["val"]
    assert (tmp_path / "val" / "val.beton").read_bytes() == (tmp_path / "all" / "val.beton").read_bytes()
    assert prepare("image-folder", folder, tmp_path / "val", settings) == manifest
    assert "--splits val" in repair_command(tmp_path / "val")
    with pytest.raises(InputError, match=r"was prepared with splits val, not train,val;"):
        prepare("image-folder", folder, tmp_path / "val", PrepSettings(splits="train,val"))
    assert names(dataset(4, 4), "val", shuffle=True, splits="val") == ["v"]
    assert list(select(dataset(4, 4), PrepSettings(splits="val,train")).splits) == ["train", "val"]


def test_the_command_shuffles_unless_told_not_to(tmp_path, folder):
    for options, chosen in (([], True), (["--no-shuffle"], False)):
        out = tmp_path / str(chosen)
        words = ["prep", "image-folder", "--from", str(folder), "--to", str(out), "--processes", "1"]
        assert main([*words, *options]) == 0
        labels = open_beton(out / "train.beton").label.tolist()
        before = read_manifest(out)
        assert before.settings["shuffle"] is chosen
        assert (labels == sorted(labels)) is not chosen
        assert ("--no-shuffle" in repair_command(out)) is not chosen
        assert main(shlex.split(repair_command(out))[1:]) == 0
        assert read_manifest(out) == before
