"""Every argument of `widemix.Loader` reaches what it is for, with a value that is not its default."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import widemix
import widemix.api.loader
from tests.library.test_library_loader import same

# By argument: another value than the default, and what else is given so that it shows in the batches.
MIXED = {"mixup": 0.8, "mix_group": 8}
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "split": ("val", {"is_training": True}),
    "batch_size": (4, {}),
    "image_size": (16, {}),
    "is_training": (False, {}),
    "shuffle": (False, {}),
    "drop_last": (False, {}),
    "seed": (8, {}),
    "rank": (1, {"world": 2}),
    "world": (2, {"rank": 0}),
    "img_dtype": (torch.bfloat16, {}),
    "num_classes": (5, {"smoothing": 0.1}),
    "interpolation": ("bicubic", {}),
    "crop_pct": (0.5, {"is_training": False}),
    "mean": ((0.1, 0.2, 0.3), {}),
    "std": ((0.1, 0.2, 0.3), {}),
    "scale": ((0.9, 1.0), {}),
    "ratio": ((1.0, 1.1), {}),
    "hflip": (1.0, {}),
    "auto_augment": ("rand-m9-mstd0.5-inc1", {}),
    "color_jitter": (0.4, {}),
    "color_jitter_prob": (0.2, {"color_jitter": 0.4}),
    "grayscale_prob": (1.0, {}),
    "gaussian_blur_prob": (1.0, {}),
    "solarize_prob": (1.0, {}),
    "num_aug_repeats": (3, {}),
    "views": (2, {}),
    "re_prob": (1.0, {}),
    "re_mode": ("const", {"re_prob": 1.0}),
    "re_count": (3, {"re_prob": 1.0}),
    "mixup": (0.8, {"mix_group": 8}),
    "cutmix": (1.0, {"mix_group": 8}),
    "cutmix_minmax": ((0.3, 0.6), {"mix_group": 8, "cutmix": 1.0}),
    "mixup_prob": (0.3, MIXED),
    "mixup_switch_prob": (1.0, MIXED | {"cutmix": 1.0}),
    "mixup_mode": ("elem", MIXED),
    "mix_group": (4, {"mixup": 0.8}),
    "smoothing": (0.1, {}),
}
UNSEEN = {"path", "device", "num_workers", "on_corrupt"}  # which no batch shows
BASE = {"split": "train", "batch_size": 8, "image_size": 24, "seed": 7, "device": "cpu", "num_workers": 1}


def batches(images: Path, keys: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(widemix.Loader(images, **{**BASE, **keys}))


def test_the_table_has_every_argument() -> None:
    assert {*CHANGES, *UNSEEN, "self"} == set(inspect.signature(widemix.Loader.__init__).parameters)


@pytest.mark.parametrize("argument", CHANGES)
def test_another_value_gives_other_batches(images: Path, argument: str) -> None:
    value, others = CHANGES[argument]
    default = inspect.signature(widemix.Loader.__init__).parameters[argument].default
    before = {"world": 3, "rank": 0, "mix_group": 8}.get(argument, default)
    fixed = {} if argument in BASE or before is inspect.Parameter.empty else {argument: before}
    expected = batches(images, others | fixed)
    assert same(batches(images, others | fixed), expected)
    found = batches(images, others | {argument: value})
    assert len(found) != len(expected) or not all(map(alike, found, expected))


def alike(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_no_batch_shows_reaches_sections_and_topology(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    loader = widemix.api.loader.TrainLoader

    def train_loader(*arguments: Any, **options: Any) -> Any:
        given[:] = arguments
        return loader(*arguments, **options)

    monkeypatch.setattr(widemix.api.loader, "TrainLoader", train_loader)
    widemix.Loader(images, **{**BASE, "num_workers": 3, "on_corrupt": "replace", "device": torch.device("cpu")})
    data, _, _, topology = given
    assert (data.path, data.workers, data.on_corrupt) == (str(images), 3, "replace")
    assert topology.device == torch.device("cpu")
    widemix.Loader(images, **{k: v for k, v in BASE.items() if k not in ("device", "num_workers")})
    data, *_ = given
    assert (data.workers, data.on_corrupt) == (0, "error")
