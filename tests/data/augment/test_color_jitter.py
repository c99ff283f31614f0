"""Colour jitter, grayscale, blur and solarisation against torchvision on Pillow images."""

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision.transforms import functional as F

from tests.data.augment.timms import images_of
from tests.data.plain_batches import jittered, uniform
from widemix.data.augment.batch import scratch_for
from widemix.data.augment.color_jitter import apply_color_jitter, build_color_jitter
from widemix.data.augment.filters import gaussian_smooth
from widemix.recipe.augment import AugmentSection


@pytest.mark.parametrize(
    "keys",
    [
        {"color_jitter": (0.4, 0.4, 0.4, 0.0)},
        {"color_jitter": (0.3, 1.5, 0.2, 0.1), "color_jitter_prob": 0.5, "solarize_prob": 0.3},
        {"color_jitter": (0.0, 0.0, 0.0, 0.5), "grayscale_prob": 0.4},
        {"grayscale_prob": 0.5, "solarize_prob": 0.5},  # the last step
        {"solarize_prob": 0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [(8, 8), (32, 32), (97, 131), (224, 224)], ids=str)
def test_steps_are_torchvisions_with_the_numbers_of_their_stream(keys, size):
    """Each decision has a random number of its own."""
    section, changed, count = AugmentSection(**keys), 0, 0
    steps = build_color_jitter(section)
    assert steps.is_on
    for stream, image in enumerate(images_of(*size) * (1 + 20 * (size == (8, 8)))):
        expected, ours = jittered(Image.fromarray(image), section, stream), image.copy()
        if uniform(stream, 12) < section.solarize_prob:
            expected = F.solarize(expected, 128)
        apply_color_jitter(ours, steps, np.uint64(stream), scratch_for(*size))
        assert np.array_equal(ours, np.asarray(expected)), stream
        changed, count = changed + (not np.array_equal(ours, image)), count + 1
    assert 0 < changed < count


def smoothed(image: np.ndarray, sigma: float) -> np.ndarray:
    scratch, rows = scratch_for(*image.shape[:2]), image.copy().reshape(len(image), -1)
    gaussian_smooth(rows, sigma, scratch.taps, scratch.wide, scratch.mixed.reshape(rows.shape), scratch.weighted)
    return rows.reshape(image.shape).astype(int)


NOISE = np.random.RandomState(3).randint(0, 256, (224, 224, 3)).astype(np.uint8)
PHOTO = load_sample_images().images[0]


@pytest.mark.parametrize("sigma", [0.1, 0.4, 1.1, 2.0, 9.0])  # of 9 the outermost taps matter
@pytest.mark.parametrize("image", [NOISE, NOISE[:97, :131], np.full_like(NOISE, 77), PHOTO], ids=lambda of: of.shape)
def test_blur_is_torchvisions_but_for_rounding(sigma, image):
    tensor = torch.from_numpy(image.copy()).permute(2, 0, 1)
    expected = F.gaussian_blur(tensor, [23, 23], [sigma, sigma]).permute(1, 2, 0).numpy().astype(int)
    difference = np.abs(smoothed(image, sigma) - expected)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-4


@pytest.mark.parametrize(("height", "width"), [(4, 3), (1, 40), (40, 1), (2, 11), (12, 2)])
def test_blur_mirrors_images_narrower_than_its_reach(height, width):
    """By NumPy's padding, as torch reflects an image once only."""
    taps = np.exp(-0.5 * (np.arange(-11, 12) / 4) ** 2)
    wide = np.pad(NOISE[:height, :width].astype(float), [(11, 11), (11, 11), (0, 0)], "reflect")
    for axis in (0, 1):
        wide = np.apply_along_axis(np.convolve, axis, wide, taps / taps.sum(), "valid")
    assert np.abs(smoothed(NOISE[:height, :width], 4.0) - wide).max() < 0.51
