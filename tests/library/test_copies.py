"""A copy of a loader works without the first one, and a pickle opens the file again."""

import copy
import gc
import os
import pickle
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import widemix
from widemix.formats.beton import open_beton

KINDS: dict[str, dict[str, Any]] = {
    "training": {"auto_augment": "rand-m9-mstd0.5-inc1", "color_jitter": 0.4, "re_prob": 0.25, "mixup": 0.5},
    "evaluation": {"is_training": False},
    "views": {"views": [widemix.View(), widemix.View(image_size=12)]},
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
    "pickled": lambda one: pickle.loads(pickle.dumps(one)),
}


def make(folder: Path, kind: str) -> widemix.Loader:
    return widemix.Loader(folder, "train", 8, 24, seed=7, device="cpu", num_workers=1, mix_group=4, **KINDS[kind])


def tensors(loader: widemix.Loader, steps: int | None = None) -> list[torch.Tensor]:
    flat = [part for images, targets in islice(loader, steps) for part in (images, targets)]
    return [each for part in flat for each in (part if isinstance(part, list) else [part])]


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_goes_on_by_itself(images: Path, kind: str, way: str) -> None:
    """From the same position, after the first one is gone, whose descriptors are closed."""
    first = make(images, kind)
    tensors(first, 2)
    first.load_state_dict(first.state_dict())
    other = COPIES[way](first)
    assert other.state_dict() == first.state_dict()
    expected = tensors(first)
    del first
    gc.collect()
    found = tensors(other)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_compares_samples_with_their_checksums(images: Path, tmp_path: Path, way: str) -> None:
    folder = Path(shutil.copytree(images, tmp_path / "data"))
    beton, data = open_beton(folder / "train.beton"), np.memmap(folder / "train.beton", np.uint8, "r+")
    data[(beton.offset + beton.size - 1).astype(np.int64)] ^= 1
    with pytest.raises(widemix.InputError, match="its bytes differ from its checksum"):
        tensors(COPIES[way](make(folder, "training")), 1)


def test_a_copy_closes_its_descriptor_alone(images: Path) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    first = make(images, "training")
    opened = descriptors()
    other = copy.deepcopy(first)
    assert descriptors() > opened
    del other
    assert descriptors() == opened
    tensors(first, 1)
    del first
    assert descriptors() <= before


def test_a_pickle_has_no_data_and_says_what_it_needs(images: Path, tmp_path: Path, monkeypatch) -> None:
    folder = Path(shutil.copytree(images, tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps(make(Path("data"), "training"))
    assert len(data) < (folder / "train.beton").stat().st_size / 10
    monkeypatch.chdir("/")  # paths are whole
    pickle.loads(data)
    shutil.rmtree(folder)
    with pytest.raises(widemix.InputError, match=r"data/train.beton: no such file; .*: send the prepared folder too"):
        pickle.loads(data)


@pytest.mark.parametrize("way", COPIES)
def test_other_public_objects_are_copied(images: Path, tmp_path: Path, way: str) -> None:
    recipe = widemix.load_recipe("digits/rp_mixer")
    assert COPIES[way](recipe) == recipe
    manifest = make(images, "training").manifest
    assert COPIES[way](manifest) == manifest
    beton = open_beton(images / "train.beton")
    assert COPIES[way](beton).label.tolist() == beton.label.tolist()
    error = COPIES[way](widemix.InputError("batch_size 0: must be at least 1"))
    assert (type(error), str(error)) == (widemix.InputError, "batch_size 0: must be at least 1")
    model = widemix.build_model(recipe)
    widemix.choose_memory_layout(model, 4, memory_layout="batch_last")
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(COPIES[way](model)(x), model(x))
