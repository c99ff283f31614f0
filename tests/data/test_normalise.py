"""Normalising in one compiled pass, or on a device, is torch's arithmetic, bit for bit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from widemix.data.grid import denormalise
from widemix.data.normalise_and_mix import normalise, normalise_with_torch, per_channel


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


def test_pixels_of_a_grid_are_those_that_were_normalised():
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).repeat(1, 1, 1, 3)
    section = SimpleNamespace(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    images = normalise(pixels, per_channel(section.mean), per_channel(section.std))
    assert np.array_equal(denormalise(images, section), pixels)
