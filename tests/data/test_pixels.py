"""Normalised pixels are torch's, and shuffled ones those of plain loops, also of a Mixer that does not notice."""

import numpy as np
import pytest
import torch

from tests.data.loading import place, read, section, train_loader
from tests.sections import train_section
from widemix.data.loader import EvalLoader
from widemix.data.normalise_and_mix import (
    normalise,
    normalise_with_torch,
    pixel_permutation,
)
from widemix.recipe.augment import AugmentSection

CPU = torch.device("cpu")
PATCHES = {"pixel_order": "patches", "pixel_patch": 4}


def permutation(side: int = 12, **keys) -> torch.Tensor | None:
    return pixel_permutation(section("", image_size=side, **keys), CPU)


@pytest.mark.parametrize(("side", "patch", "seed"), [(12, 4, 0), (12, 3, 5), (8, 8, 0)])
def test_patches_and_the_pixels_within_them_move_alike_in_all(side, patch, seed):
    """By numpy's permutations of the seed, of all runs: they must not change."""
    numbers, across, expected = np.random.RandomState(seed), side // patch, np.empty((side, side), int)
    patches, within = numbers.permutation(across**2), numbers.permutation(patch**2)
    for y, x in np.ndindex(side, side):
        origin = divmod(patches[y // patch * across + x // patch], across)
        pixel = divmod(within[y % patch * patch + x % patch], patch)
        expected[y, x] = (origin[0] * patch + pixel[0]) * side + origin[1] * patch + pixel[1]
    found = permutation(side, pixel_order="patches", pixel_patch=patch, pixel_seed=seed)
    assert found.tolist() == expected.reshape(-1).tolist()


def test_all_pixels_move_by_a_permutation_of_the_seed_alone():
    assert permutation(pixel_order="original") is None
    for seed in (0, 1):
        expected = np.random.RandomState(seed).permutation(144).tolist()
        assert permutation(pixel_order="all", pixel_seed=seed).tolist() == expected


@pytest.mark.parametrize("keys", [PATCHES, {"pixel_order": "all"}], ids=["patches", "all"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_loaders_shuffle_what_they_yield_otherwise(images, keys, precision):
    keys, train = keys | {"pixel_seed": 3}, train_section(16, precision=precision)
    plain, shuffled = (section(images, image_size=8, **of) for of in ({}, keys))
    order, augment = permutation(8, **keys).numpy(), AugmentSection(mixup=0.4, cutmix=1.0, mix_group=4)
    for make in (lambda data: train_loader(data, augment, train=train), lambda data: EvalLoader(data, 16, place())):
        for one, other in zip(*(read(make(data)) for data in (plain, shuffled)), strict=True):
            expected = one.inputs.float().reshape(-1, 3, 64)[:, :, order].reshape(-1, 3, 8, 8)
            assert torch.equal(other.inputs.float(), expected)
            assert other.inputs.dtype == one.inputs.dtype
            assert other.inputs.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(one.targets, other.targets)


@pytest.mark.parametrize("shape", [(3, 5, 7, 3), (2, 224, 224, 3), (0, 8, 8, 3)])
def test_normalised_is_torchs_arithmetic(shape):
    images = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = torch.tensor([124.0, 116.3, 103.5])[:, None, None], torch.tensor([58.4, 57.1, 57.3])[:, None, None]
    to = [torch.full(shape, torch.nan) for _ in range(2)]
    given = normalise(images, mean, std, to[0]), normalise_with_torch(images, mean, std, to[1])
    assert [one.data_ptr() for one in given] == [one.data_ptr() for one in to]
    for ours in (normalise(images, mean, std), normalise_with_torch(images, mean, std), *given):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, (images.permute(0, 3, 1, 2).float() - mean) / std)
        assert ours.is_contiguous(memory_format=torch.channels_last)
