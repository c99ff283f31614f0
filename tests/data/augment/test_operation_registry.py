"""Operations of other packages: in policies, on the sheet, and without torch or numba to name them."""

import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from timm.data import auto_augment

from tests.clone import CLONE
from tests.data.augment.timms import MEAN, applied, compiled, sampled
from tests.data.loading import read, section, train_loader
from widemix.analysis.augment import all_comparisons, comparison_tiles
from widemix.data.augment.batch import build_augmentation
from widemix.data.augment.program import compile_policy
from widemix.data.augment.registry import LINEAR, OPERATIONS, ROTATE, SIGNED, SKIP, MagnitudeMap, register_operation
from widemix.data.random import AUGMENT, key
from widemix.errors import InputError
from widemix.recipe.augment import AugmentSection
from widemix.recipe.policy import OWN_SETS, RandAugment, Step, add_to_sets, parse_policy


def darken(image: np.ndarray, argument: float) -> None:
    image[:] = image / max(1.0, argument)


def roll(image: np.ndarray, argument: float) -> None:
    image[:] = np.roll(image, round(argument), axis=1)


@pytest.fixture
def registered():
    """Darken in the sets `mine` and `mixed`, Roll in `mine` and Rotate in `mixed`; removed after the test."""
    built_in, sets = len(OPERATIONS), dict(OWN_SETS)
    register_operation("Darken", darken, MagnitudeMap(LINEAR, 8, 1), sets=("mine", "mixed"), shown=(1, 2, 8))
    register_operation("Roll", roll, MagnitudeMap(SIGNED, 5), sets=("mine",))
    add_to_sets("Rotate", ["mixed"])
    yield OPERATIONS[built_in:]
    del OPERATIONS[built_in:]
    OWN_SETS.clear()
    OWN_SETS.update(sets)


def test_a_set_of_its_own_is_a_policy(registered):
    assert parse_policy("rand-m9-n3-tmine") == RandAugment(
        (Step("Darken", 0.5, 9), Step("Roll", 0.5, 9)), layers=3, weights=None
    )
    with pytest.raises(InputError, match="takes one set of operations, of tweights, t3a, t3aw, tmine, tmixed, w0"):
        parse_policy("rand-m9-tyours")


def test_a_policy_samples_registered_and_compiled_operations(registered):
    text = "rand-m9-n3-mstd1-tmixed"
    images = np.random.RandomState(0).randint(0, 256, (40, 16, 16, 3)).astype(np.uint8)
    found, view_ids, numbers = images.copy(), np.arange(200, 240), set()
    build_augmentation(AugmentSection(auto_augment=text), MEAN, "random")(found, view_ids, 7, 2, threads=2)
    for image, result, view_id in zip(images, found, view_ids, strict=True):
        for number, argument, cubic in sampled(compiled(text), key(7, 2, view_id, AUGMENT), 3):
            if number == registered[0].number:
                assert 1 <= argument <= 9
                darken(image, argument)
            elif number == ROTATE:
                image[:] = applied(image, ROTATE, argument, bool(cubic))
            numbers.add(number)
        assert np.array_equal(result, image)
    assert numbers == {SKIP, ROTATE, registered[0].number}


def test_a_loader_trains_on_it_alike_on_any_threads(registered, images):
    def batches(threads: int, epoch: int = 1, policy: str | None = "rand-m9-tmine-p1") -> list:
        loader = train_loader(section(images, workers=threads), AugmentSection(auto_augment=policy))
        return [batch.inputs.tolist() for batch in read(loader, epoch)]

    expected = batches(threads=1)
    assert batches(threads=2) == expected
    for change in ({"epoch": 2}, {"policy": None}):
        assert not any(a == b for a, b in zip(batches(1, **change), expected, strict=True)), change


def test_the_sheet_has_it_without_a_peer(registered):
    darker, rolled = (
        comparison for comparison in all_comparisons((1, 2, 3)) if comparison.name in ("Darken", "Roll")
    )
    assert darker.number == registered[0].number
    image = np.full((8, 8, 3), 80, np.uint8)
    tiles, captions = comparison_tiles(darker, image)
    assert [tile[0, 0, 0] for tile in tiles] == [80, 40, 10]
    assert captions == ["ours 1", "ours 2", "ours 8"]
    assert min(rolled.arguments) < 0 < max(rolled.arguments) <= 5


def test_the_sheet_shows_the_range_of_a_map(registered):
    register_operation("Linear", darken, MagnitudeMap(LINEAR, 8, 1), sets=("mine",))
    register_operation("Plain", darken, MagnitudeMap(), sets=("mine",))
    shown = {comparison.name: comparison.arguments for comparison in all_comparisons((1, 2, 3))}
    assert (min(shown["Linear"]), max(shown["Linear"])) == (1, 9)
    assert shown["Plain"] == (0,)


@pytest.mark.parametrize(
    ("name", "sets", "words"),
    [
        ("Rotate", (), "operation 'Rotate': is registered already"),
        ("Darken", (), "operation 'Darken': is registered already"),
        ("Other", ("more", "3a"), "operation set '3a': is timm's"),
        ("Other", ("a-b",), "operation set 'a-b': needs a name without '-'"),
    ],
)
def test_what_cannot_be_registered_is_refused_and_changes_nothing(registered, name, sets, words):
    before = len(OPERATIONS), dict(OWN_SETS)
    with pytest.raises(ValueError, match=words):
        register_operation(name, darken, MagnitudeMap(), sets=sets)
    assert before == (len(OPERATIONS), OWN_SETS)
    with pytest.raises(InputError, match="operation 'Other': no such operation"):
        compile_policy(RandAugment((Step("Other", 0.5, 9),), 1, None), MEAN)


def test_every_name_of_timms_policies_is_one_of_one_operation():
    names = [name for operation in OPERATIONS for name in operation.magnitude_maps]
    assert len(names) == len(set(names)) == 25
    assert len({operation.number for operation in OPERATIONS}) == len(OPERATIONS) == 16


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.peer)
def test_the_sheet_shows_the_whole_range_of_timms_arguments(operation, system):
    values = set()
    for name in operation.magnitude_maps.keys() - {"GaussianBlurRand", "Desaturate"}:  # timm's compute theirs later
        level_to_arg = auto_augment.LEVEL_TO_ARG[name]
        for magnitude, sign in product(range(11), (0.0, 1.0)):
            system({"random.random": lambda sign=sign: sign})
            values |= set(level_to_arg(magnitude, {})[:1] if level_to_arg else ())
    if "Desaturate" in operation.magnitude_maps:
        values.add(0.0)  # no colour is left
    if values:
        assert (min(operation.shown), max(operation.shown)) == pytest.approx((min(values), max(values)))
    else:
        assert not operation.has_argument


def test_registering_needs_neither_torch_nor_numba():
    script = "import sys, widemix.data.augment.registry; print({'torch', 'numba'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], cwd=CLONE, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
