"""Erasing: timm's boxes for the same random numbers, filled with what the mode says."""

import random

import pytest
import torch
from timm.data.random_erasing import RandomErasing

from pipeline.data.augment.erase import boxes, erase


@pytest.mark.parametrize("count", [1, 3])
def test_erased_boxes_are_timms_with_the_same_numbers(count):
    timms = RandomErasing(0.5, mode="const", max_count=count, device="cpu")
    erased = 0
    for stream in range(200):
        expected = torch.ones(3, 32, 32)
        random.seed(stream)
        timms(expected)
        ours = torch.ones(1, 3, 32, 32)
        erase(ours, [stream], prob=0.5, count=count, mode="const")
        assert torch.equal(ours[0], expected)
        erased += bool((expected == 0).any())
    assert 60 < erased < 140


def test_erasing_modes_fill_with_standard_normal_numbers():
    images = torch.full((400, 3, 32, 32), 99.0)
    erase(images, range(400), prob=1.0, count=1, mode="pixel")
    noise = images[images != 99.0]
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.01
    images = torch.full((1, 3, 32, 32), 99.0)
    erase(images, [5], prob=1.0, count=1, mode="rand")
    [(top, left, height, width)] = boxes(random.Random(5), 32, 1.0, 1)
    region = images[0, :, top : top + height, left : left + width]
    assert torch.equal(region, region[:, :1, :1].expand_as(region))
    assert len(region[:, 0, 0].unique()) == 3
