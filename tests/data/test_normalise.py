"""Normalising in one compiled pass, or on a device, is torch's arithmetic, bit for bit."""

import pytest
import torch

from widemix.data.normalise import normalise, normalise_with_torch


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
