"""Every key of sections `data` and `augment` reaches the loaders of a run, with a value that is not its default.

Those that are arguments of `widemix.Loader` have their table in tests/library/test_loader_arguments.py.
"""

import inspect
import re
from typing import Any

import pytest

import widemix
from tests.cli.test_arguments import arguments_of
from tests.data.loading import place, read, section, train_loader
from widemix.data.loader import EvalLoader
from widemix.data.paged import PagedOrder
from widemix.errors import InputError
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection

OTHERWISE_NAMED = {  # in `widemix.Loader`
    "train_split": "split",
    "workers": "num_workers",
    "aug_repeats": "num_aug_repeats",
    "mix_mode": "mixup_mode",
}


def error(loader) -> str:
    with pytest.raises(InputError) as raised:
        read(loader, 0)
    return re.split("[:;]", str(raised.value).partition("cannot be read: ")[2])[0]


SEEN = {
    "images": lambda loader: [batch.inputs.tolist() for batch in read(loader, 0)],
    "order": lambda loader: type(loader.order),
    "window": lambda loader: arguments_of(lambda: train_loader(loader.data), "data.paged.PagedOrder")["window_bytes"],
    "ahead": lambda loader: arguments_of(lambda: loader.batches(0), "data.batches.Prefetch")["ahead"],
    "evaluated": lambda loader: len(EvalLoader(loader.data, 8, place())),
    "damage": error,
}
PAGED, PATCHES, PADDED = {"order": "paged"}, {"pixel_order": "patches", "pixel_patch": 4}, {"crop": "padded"}
# Another value, which other keys are set, what is seen, and as what; where that is None, not as without it, and
# test_pixel_order and test_golden_batches know the images.
KEYS: dict[str, tuple[Any, dict[str, Any], str, Any]] = {
    "data.eval_split": ("train", {}, "evaluated", 53),
    "data.checksums": (False, {}, "damage", "Not a JPEG file"),
    "data.order": ("paged", {}, "order", PagedOrder),
    "data.memory_gib": (1e-6, {}, "order", PagedOrder),
    "data.shuffle_window_mib": (3, PAGED, "window", 3 << 20),
    "data.prefetch_batches": (2, {}, "ahead", 2),
    "data.prefetch_mib": (1, {"image_size": 120}, "ahead", 1),  # a batch of 24 has 1,012 KiB
    "data.pixel_order": ("all", {}, "images", None),
    "data.pixel_patch": (8, PATCHES, "images", None),
    "data.pixel_seed": (7, PATCHES, "images", None),
    "augment.crop": ("padded", {}, "images", None),
    "augment.padding": (5, PADDED, "images", None),
}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_does_what_it_is_for(images, damaged, key):
    value, others, seen, expected = KEYS[key]
    part, _, name = key.partition(".")

    def found(**keys):
        folder = damaged if seen == "damage" else images
        data, augment = (section(folder, **keys), {}) if part == "data" else (section(folder), keys)
        return SEEN[seen](train_loader(data, AugmentSection(**augment)))

    plain, other = found(**others), found(**others | {name: value})
    assert plain != other
    assert expected is None or other == expected


def test_the_table_and_that_of_loader_have_every_key():
    arguments = set(inspect.signature(widemix.Loader).parameters)
    theirs = {"kind", "targets"}  # properties of the prepared folder, which is refused with others
    for name, of in (("data", DataSection), ("augment", AugmentSection)):
        missing = {key for key in of.model_fields if OTHERWISE_NAMED.get(key, key) not in arguments}
        assert missing - theirs == {key.partition(".")[2] for key in KEYS if key.startswith(f"{name}.")}
