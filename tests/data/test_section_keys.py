"""Every key of sections `data` and `augment` reaches the loaders of a run, with a value that is not its default.

Those that are arguments of `widemix.Loader` have their table in tests/library/test_loader_arguments.py.
"""

import inspect
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import widemix
import widemix.data.loader
from tests.conftest import ROOT
from widemix.data.loader import EvalLoader, TrainLoader
from widemix.data.paged import PagedOrder
from widemix.data.prefetch import Prefetch
from widemix.distributed.topology import Topology
from widemix.errors import InputError, RunError
from widemix.recipe import load_recipe
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection

ALONE = Topology(0, 1, 0, 1, torch.device("cpu"))
OTHERWISE_NAMED = {  # in `widemix.Loader`
    "train_split": "split",
    "workers": "num_workers",
    "aug_repeats": "num_aug_repeats",
    "mix_mode": "mixup_mode",
}


def recipe_of(folder: Path, *overrides: tuple[str, str]) -> Any:
    return load_recipe(ROOT / "recipes/digits/mixer.yaml", [("data.path", str(folder)), *overrides])


def train_loader(folder: Path, *overrides: tuple[str, str]) -> TrainLoader:
    recipe = recipe_of(folder, *overrides)
    return TrainLoader(recipe.data, recipe.augment, recipe.train, ALONE)


def first_images(loader: TrainLoader) -> list[Any]:
    with loader.batches(0) as batches:
        return next(batches).inputs.tolist()


def evaluated(folder: Path, *overrides: tuple[str, str]) -> int:
    return len(EvalLoader(recipe_of(folder, *overrides).data, 8, ALONE))


def batches_ahead(folder: Path, *overrides: tuple[str, str]) -> int:
    counts: list[int] = []

    class Counted(Prefetch):
        def __init__(self, source: Any, ahead: int):
            counts.append(ahead)
            super().__init__(source, ahead)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(widemix.data.loader, "Prefetch", Counted)
        with train_loader(folder, *overrides).batches(0):
            return counts[0]


def window_bytes(folder: Path, *overrides: tuple[str, str]) -> int:
    given: list[Any] = []

    class Noted(PagedOrder):
        def __init__(self, *arguments: Any):
            given[:] = arguments
            super().__init__(*arguments)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(widemix.data.loader, "PagedOrder", Noted)
        train_loader(folder, *overrides)
    return given[list(inspect.signature(PagedOrder).parameters).index("window_bytes")]


def reads_damaged_samples(folder: Path, *overrides: tuple[str, str]) -> bool:
    """Whether images are given of which one bit of the last byte is another than when they were prepared."""
    damaged = folder.with_name("damaged")
    shutil.copytree(folder, damaged, dirs_exist_ok=True)
    file = train_loader(folder).source.file
    written = np.memmap(damaged / "train.beton", np.uint8, "r+")
    written[(file.offset + file.size - 1).astype(np.int64)] ^= 1
    written.flush()
    try:
        first_images(train_loader(damaged, *overrides))
    except (InputError, RunError) as error:
        return "checksum" not in str(error)
    return True


@dataclass(frozen=True)
class Row:
    """`seen` of the digits with that value is `expected`, and is not without it."""

    value: str
    seen: Callable[..., Any]
    expected: Callable[[Path], Any]
    others: tuple[tuple[str, str], ...] = ()

    def check(self, key: str, folder: Path) -> None:
        expected = self.expected(folder)
        assert self.seen(folder, *self.others, (key, self.value)) == expected
        assert self.seen(folder, *self.others) != expected


def sampled_classes(folder: Path, *overrides: tuple[str, str]) -> set[int]:
    loader = train_loader(folder, *overrides)
    return {*loader.source.file.label[loader.order.step(0, 0) % len(loader)].tolist()}


def images(folder: Path, *overrides: tuple[str, str]) -> list[Any]:
    return first_images(train_loader(folder, *overrides))


def shuffled(patch: int, seed: int, *overrides: tuple[str, str]) -> Callable[[Path], Any]:
    """The images with their patches, and the pixels within each, in the order that `seed` gives."""

    def expected(folder: Path) -> list[Any]:
        plain = np.array(images(folder, *overrides))
        numbers, (count, channels, side, _) = np.random.RandomState(seed), plain.shape
        across = side // patch
        order = numbers.permutation(across**2), numbers.permutation(patch**2)
        parts = plain.reshape(count, channels, across, patch, across, patch).transpose(0, 1, 2, 4, 3, 5)
        parts = parts.reshape(count, channels, across**2, patch**2)[:, :, order[0]][..., order[1]]
        parts = parts.reshape(count, channels, across, across, patch, patch).transpose(0, 1, 2, 4, 3, 5)
        return parts.reshape(plain.shape).tolist()

    return expected


def all_shuffled(folder: Path) -> list[Any]:
    plain = np.array(images(folder))
    rows = plain.reshape(*plain.shape[:2], 64)[..., np.random.RandomState(0).permutation(64)]
    return rows.reshape(plain.shape).tolist()


def whole(folder: Path) -> list[Any]:
    """The images as they are stored, none of which is flipped."""
    keys = [("augment.scale", "[1, 1]"), ("augment.ratio", "[1, 1]"), ("augment.hflip", "0")]
    return images(folder, *keys)


PADDED = (("augment.crop", "padded"), ("augment.hflip", "0"))
LARGE = (("data.image_size", "16"), ("model.tokens", "64"))
PATCHES = (("data.pixel_order", "patches"), ("data.pixel_patch", "2"))
KEYS: dict[str, Row] = {
    "data.eval_split": Row("train", evaluated, lambda folder: 1437),
    "data.checksums": Row("false", reads_damaged_samples, lambda folder: True),
    "data.order": Row("paged", lambda *given: type(train_loader(*given).order), lambda folder: PagedOrder),
    "data.memory_gib": Row("1e-6", lambda *given: type(train_loader(*given).order), lambda folder: PagedOrder),
    "data.shuffle_window_mib": Row("3", window_bytes, lambda folder: 3 << 20, (("data.order", "paged"),)),
    "data.sampling": Row("{0: 0}", sampled_classes, lambda folder: {*range(1, 10)}),
    "data.prefetch_batches": Row("2", batches_ahead, lambda folder: 2),
    "data.prefetch_mib": Row(
        "1",  # 32 images of 64 x 64 pixels have 384 KiB
        batches_ahead,
        lambda folder: 2,
        (("data.image_size", "64"), ("model.tokens", "1024"), ("train.global_batch", "32")),
    ),
    "data.pixel_order": Row("all", images, all_shuffled),
    "data.pixel_patch": Row("8", images, shuffled(8, 0, *LARGE), (*LARGE, ("data.pixel_order", "patches"))),
    "data.pixel_seed": Row("7", images, shuffled(2, 7), PATCHES),
    "augment.crop": Row("padded", images, whole, (("augment.padding", "0"), ("augment.hflip", "0"))),
    "augment.padding": Row("0", images, whole, PADDED),
}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_does_what_it_is_for(digits, key):
    KEYS[key].check(key, digits)


def test_the_table_and_that_of_loader_have_every_key():
    arguments = set(inspect.signature(widemix.Loader).parameters)
    theirs = {"kind", "targets"}  # properties of the prepared folder, which is refused with others
    for name, section in (("data", DataSection), ("augment", AugmentSection)):
        missing = {key for key in section.model_fields if OTHERWISE_NAMED.get(key, key) not in arguments}
        assert missing - theirs == {key.partition(".")[2] for key in KEYS if key.startswith(f"{name}.")}
