"""Erasing: timm's boxes for the same random numbers, filled by mode."""

import numpy as np
import pytest
import torch
from timm.data import random_erasing

from tests.data.plain_batches import ERASE, erasing_numbers, stream_of
from widemix.data.augment.erase import Erasing, erase, erase_with_torch, sample_boxes, sample_erasing
from widemix.recipe.augment import AugmentSection

SEED, EPOCH = 3, 2


def blank(images: int, side: int) -> torch.Tensor:
    return torch.full((images, 3, side, side), 99.0).contiguous(memory_format=torch.channels_last)


def erased(count: int, mode: str, batch: int, side: int = 32, prob: float = 1.0) -> torch.Tensor:
    images = blank(batch, side)
    section = AugmentSection(re_prob=prob, re_count=count, re_mode=mode)
    erase(images, sample_erasing(np.arange(batch), side, section, SEED, EPOCH))
    return images


@pytest.mark.parametrize("count", [1, 3, 10])
@pytest.mark.parametrize("side", [4, 8, 32, 224])
def test_erased_boxes_are_timms_with_the_same_numbers(count, side, system):
    timms = random_erasing.RandomErasing(0.5, mode="const", max_count=count, device="cpu")
    ours = erased(count, "const", 200, side, prob=0.5)
    for sample in range(200):
        expected = torch.full((3, side, side), 99.0)
        system({"timm.data.random_erasing.random": erasing_numbers(stream_of(SEED, EPOCH, sample, ERASE))})
        timms(expected)
        assert torch.equal(ours[sample], expected)
    assert 60 < sum(bool((image == 0).any()) for image in ours) < 140


@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
@pytest.mark.parametrize(("side", "count"), [(32, 1), (32, 3), (2, 1), (8, 10)])  # the last two sample empty boxes
def test_other_devices_erase_like_the_cpu(side, count, mode):
    images = blank(200, side)
    erase_with_torch(images, Erasing(*sample_boxes(np.arange(200), SEED, EPOCH, side, 0.7, count), mode))
    assert torch.equal(images, erased(count, mode, 200, side, prob=0.7))
    assert (images != 99.0).any()
