"""Policies and erasing: timm's own results for the same random numbers, and independent of everything else."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment
from timm.data.random_erasing import RandomErasing

from pipeline.data.augment.erase import boxes, erase
from pipeline.data.augment.policy import Policy, posterize
from pipeline.errors import InputError

MEAN = (0.485, 0.456, 0.406)


@pytest.fixture
def picture():
    rows, columns = np.mgrid[0:64, 0:64]
    noise = np.random.RandomState(0).randint(0, 40, (64, 64, 3))
    return (np.stack([rows * 3, columns * 3, 200 - rows], axis=-1) + noise).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("text", ["rand-m9-mstd0.5-inc1", "rand-m5-n3-mmax8", "original", "3a", "augmix-m3-w2"])
def test_a_policy_is_timms_with_the_same_numbers(picture, text):
    params = {"translate_const": int(64 * 0.45), "img_mean": (124, 116, 104)}
    if text.startswith("rand"):
        timms = auto_augment.rand_augment_transform(text, params)
    elif text.startswith("augmix"):
        timms = auto_augment.augment_and_mix_transform(text, params | {"translate_pct": 0.3})
    else:
        timms = auto_augment.auto_augment_transform(text, params)
    ours = Policy(text, 64, MEAN)
    changed = 0
    for stream in range(1, 40):
        random.seed(stream)
        np.random.seed(stream)
        try:
            expected = np.asarray(timms(Image.fromarray(picture)))
        except ValueError:  # timm keeps 0 bits at times, which Pillow 13 refuses
            continue
        assert np.array_equal(ours(picture, stream), expected)
        changed += not np.array_equal(expected, picture)
    assert changed > 20


def test_a_policy_leaves_the_global_generators_alone(picture):
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    Policy("rand-m9-mstd0.5-inc1", 64, MEAN)(picture, 2**64 - 1)
    assert (random.random(), np.random.rand()) == expected


def test_no_magnitude_crashes_as_timm_does_with_pillow_13(picture):
    """At magnitude 10 PosterizeIncreasing keeps 0 bits: black, where Pillow 13 raises."""
    ours = Policy("rand-m10-mmax10-inc1", 64, MEAN)
    for stream in range(300):
        ours(picture, stream)
    assert not np.asarray(posterize(Image.fromarray(picture), 0)).any()


@pytest.mark.parametrize("text", ["rnd-m9", "rand-m9-x4", "nonsense", ""])
def test_a_policy_that_timm_does_not_know_is_refused(text):
    with pytest.raises(InputError, match="is not a policy that timm knows"):
        Policy(text, 64, MEAN)


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
