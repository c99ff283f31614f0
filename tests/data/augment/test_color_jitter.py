"""Colour jitter, grayscale and blur against torchvision on Pillow images."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torchvision.transforms import functional as F

from widemix.data.augment import color_jitter
from widemix.data.augment.color_jitter import (
    ColorJitter,
    apply_color_jitter,
    build_color_jitter,
    sample_jitter,
    sample_sigma,
)
from widemix.data.augment.hue import turn_hue
from widemix.data.augment.scratch import scratch_for
from widemix.data.augment.smooth import gaussian_smooth
from widemix.data.random import COLOR_JITTER, key
from widemix.recipe.augment import AugmentSection

OFF = (0.0, 0.0, 0.0, 0.0)
ADJUST = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)


def changed(
    image: np.ndarray, stream: int, jitter=OFF, jitter_prob=0.0, gray_prob=0.0, blur_prob=0.0, solarize_prob=0.0
):
    ours = image.copy()
    steps = ColorJitter(np.array(jitter), jitter_prob, gray_prob, blur_prob, solarize_prob)
    apply_color_jitter(ours, steps, np.uint64(stream), scratch_for(*image.shape[:2]))
    return ours


@pytest.mark.parametrize("strength", [(0.4, 0.4, 0.4, 0.0), (0.3, 1.5, 0.2, 0.1), (0.0, 0.0, 0.0, 0.5)])
def test_jitter_is_torchvisions_with_the_same_numbers(images, strength):
    for stream, image in enumerate(images):
        expected = Image.fromarray(image)
        for part, factor in sample_jitter(np.array(strength), np.uint64(stream)):
            if strength[int(part)]:
                expected = ADJUST[int(part)](expected, factor)
        assert np.array_equal(changed(image, stream, strength, jitter_prob=1.0), np.asarray(expected))


def test_every_colour_turns_as_pillow_turns_it():
    steps = np.append(np.arange(0, 256, 5), [1, 254]).astype(np.uint8)
    cube = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(1, -1, 3)
    for turn in (-0.5, -0.33, -0.001, 0.0, 0.07, 0.25, 0.5):
        ours = cube.copy()
        turn_hue(ours.reshape(-1), turn)
        assert np.array_equal(ours, np.asarray(F.adjust_hue(Image.fromarray(cube), turn))), turn


def test_each_strength_alone_is_jitter():
    for strengths in 0.3 * np.eye(4):
        assert build_color_jitter(AugmentSection(color_jitter=tuple(strengths.tolist()))).is_on
    assert not build_color_jitter(AugmentSection()).is_on
    assert not build_color_jitter(AugmentSection(color_jitter=(0.3,) * 4, color_jitter_prob=0.0)).is_on


@pytest.mark.parametrize("name", ["grayscale_prob", "gaussian_blur_prob", "solarize_prob"])
def test_each_of_the_other_steps_is_done_without_jitter(name):
    """With the probability that is its own."""
    section = AugmentSection(**{name: 0.25})
    names = ("color_jitter_prob", "grayscale_prob", "gaussian_blur_prob", "solarize_prob")
    steps = build_color_jitter(section)
    assert steps.is_on
    assert list(steps[1:]) == [0.25 if each == name else 0.0 for each in names]


def test_jitter_samples_every_order_and_its_whole_range():
    strength = np.array([0.4, 1.5, 0.2, 0.1])
    sampled = np.array(
        [sample_jitter(strength, np.uint64(key(1, 1, sample, COLOR_JITTER))) for sample in range(20_000)]
    )
    orders = Counter(tuple(order) for order in sampled[:, :, 0].astype(int))
    assert len(orders) == 24
    assert stats.chisquare(list(orders.values())).pvalue > 1e-3
    for part, (low, high) in enumerate([(0.6, 1.4), (0, 2.5), (0.8, 1.2), (-0.1, 0.1)]):
        factors = sampled[sampled[:, :, 0] == part][:, 1]
        assert stats.kstest(factors, stats.uniform(low, high - low).cdf).pvalue > 1e-3
    sigmas = [sample_sigma(np.uint64(key(1, 1, sample, COLOR_JITTER))) for sample in range(20_000)]
    assert stats.kstest(sigmas, stats.uniform(0.1, 1.9).cdf).pvalue > 1e-3


@pytest.mark.parametrize("numbers", [[0.5] * 4, [0.5, 0.2, 0.5, 0.2], [0.1, 0.9, 0.3, 0.3], [0.4, 0.3, 0.2, 0.1]])
def test_jitter_is_in_the_order_of_its_numbers_and_equal_ones_in_that_of_the_parts(numbers, monkeypatch):
    monkeypatch.setitem(sample_jitter.py_func.__globals__, "uniform", lambda _, counter: numbers[counter % 4])
    sampled = sample_jitter.py_func(np.full(4, 0.1), 0)
    assert list(sampled[:, 0]) == list(np.argsort(numbers, kind="stable"))


def test_each_decision_has_a_random_number_of_its_own():
    """Which of an image's numbers: one each, but four of the strengths and of the order."""
    counters = [getattr(color_jitter, f"_{name}") for name in ("JITTER", "GRAY", "BLUR", "SIGMA", "SOLARIZE")]
    counters += [first + part for first in (color_jitter._STRENGTH, color_jitter._ORDER) for part in range(4)]
    assert len({*counters}) == len(counters) == 13


def test_grayscale_is_torchvisions_as_often_as_asked(images):
    for stream, image in enumerate(images):
        expected = np.asarray(F.rgb_to_grayscale(Image.fromarray(image), 3))
        assert np.array_equal(changed(image, stream, gray_prob=1.0), expected)
    small = np.array([[[1, 100, 200]]], np.uint8)
    grey = sum(changed(small, key(1, 1, s, COLOR_JITTER), gray_prob=0.2)[0, 0, 0] != 1 for s in range(3000))
    assert abs(grey - 600) < 4 * math.sqrt(3000 * 0.2 * 0.8)


def test_solarisation_is_torchvisions_and_the_last_step(images):
    for stream, image in enumerate(images):
        expected = np.asarray(F.solarize(F.rgb_to_grayscale(Image.fromarray(image), 3), 128))
        assert np.array_equal(changed(image, stream, gray_prob=1.0, solarize_prob=1.0), expected)
    small = np.full((1, 1, 3), 200, np.uint8)
    turned = sum(changed(small, key(1, 1, s, COLOR_JITTER), solarize_prob=0.2)[0, 0, 0] == 55 for s in range(3000))
    assert abs(turned - 600) < 4 * math.sqrt(3000 * 0.2 * 0.8)


@pytest.mark.parametrize("sigma", [0.1, 0.4, 1.1, 2.0, 9.0])  # of 9 the outermost taps matter
@pytest.mark.parametrize(("height", "width"), [(32, 32), (224, 224), (97, 131)])
def test_blur_is_torchvisions_but_for_rounding(sigma, height, width):
    numbers = np.random.RandomState(3)
    for image in (numbers.randint(0, 256, (height, width, 3)), np.full((height, width, 3), 77)):
        tensor = torch.from_numpy(image.astype(np.uint8)).permute(2, 0, 1)
        expected = F.gaussian_blur(tensor, [23, 23], [sigma, sigma]).permute(1, 2, 0).numpy().astype(int)
        scratch = scratch_for(height, width)
        rows = image.astype(np.uint8).reshape(height, -1)
        between = scratch.mixed.reshape(height, -1)
        gaussian_smooth(rows, sigma, scratch.taps, scratch.wide, between, scratch.weighted)
        difference = np.abs(rows.reshape(expected.shape) - expected)
        assert difference.max() <= 1
        assert (difference > 0).mean() < 1e-4


@pytest.mark.parametrize(("height", "width"), [(4, 3), (1, 40), (40, 1), (2, 11), (12, 2)])
def test_blur_mirrors_images_narrower_than_its_reach(height, width):
    """By NumPy's padding, as torch reflects an image once only."""
    image = np.random.RandomState(height).randint(0, 256, (height, width, 3)).astype(np.uint8)
    taps = np.exp(-0.5 * (np.arange(-11, 12) / 4) ** 2)
    wide = np.pad(image.astype(float), [(11, 11), (11, 11), (0, 0)], "reflect")
    for axis in (0, 1):
        wide = np.apply_along_axis(np.convolve, axis, wide, taps / taps.sum(), "valid")
    scratch, rows = scratch_for(height, width), image.reshape(height, -1)
    gaussian_smooth(rows, 4.0, scratch.taps, scratch.wide, scratch.mixed.reshape(height, -1), scratch.weighted)
    assert np.abs(image - wide).max() < 0.51
