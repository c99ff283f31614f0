"""Colour jitter, grayscale, Gaussian blur and solarisation after the policy, with torchvision's distributions.

The first three are in timm's order; solarisation is the last, as in BYOL, MoCo v3 and DINO. Hue is changed as by
torchvision, through Pillow's eight-bit HSV: bit-identical to Pillow 13 (Convert.c).
"""

import math
from typing import NamedTuple

import numpy as np

from widemix.data.augment.filters import gaussian_smooth
from widemix.data.augment.values import brightness, color, contrast, solarize
from widemix.data.compiled import jit, jit_noalias
from widemix.data.random import uniform
from widemix.recipe.augment import AugmentSection

# Counters of an image's random stream; those of strength and order are four each.
_JITTER, _GRAY, _BLUR, _SIGMA, _STRENGTH, _ORDER, _SOLARIZE = 0, 1, 2, 3, 4, 8, 12


class ColorJitter(NamedTuple):
    """Strengths and probabilities, for compiled code."""

    jitter: np.ndarray  # float64 [4]: brightness, contrast, saturation, hue
    jitter_prob: float
    gray_prob: float
    blur_prob: float
    solarize_prob: float

    @property
    def is_on(self) -> bool:
        """Whether it changes any image."""
        return max(self.jitter_prob, self.gray_prob, self.blur_prob, self.solarize_prob) > 0


def build_color_jitter(section: AugmentSection) -> ColorJitter:
    """The section's colour jitter, grayscale, blur and solarisation."""
    jitter_prob = section.color_jitter_prob if any(section.color_jitter) else 0.0
    strengths = np.array(section.color_jitter)
    probs = jitter_prob, section.grayscale_prob, section.gaussian_blur_prob, section.solarize_prob
    return ColorJitter(strengths, *probs)


@jit
def apply_color_jitter(image, color_jitter, stream, scratch):
    """Change image uint8 [H, W, 3] in place, with random numbers of the stream."""
    values = image.reshape(-1)
    if uniform(stream, _JITTER) < color_jitter.jitter_prob:
        for part, factor in sample_jitter(color_jitter.jitter, stream):
            _jitter(values, int(part), factor, scratch)
    if uniform(stream, _GRAY) < color_jitter.gray_prob:
        color(values, 0.0, scratch.tables)
    if uniform(stream, _BLUR) < color_jitter.blur_prob:
        rows = image.reshape(image.shape[0], -1)
        between = scratch.mixed.reshape(rows.shape)
        gaussian_smooth(rows, sample_sigma(stream), scratch.taps, scratch.wide, between, scratch.weighted)
    if uniform(stream, _SOLARIZE) < color_jitter.solarize_prob:
        solarize(values, 128)


@jit
def sample_jitter(strength, stream):
    """float64 [4, 2]: brightness 0, contrast 1, saturation 2 and hue 3 in random order, each with its factor."""
    sampled = np.empty((4, 2))
    for part in range(4):
        place, own = 0, uniform(stream, _ORDER + part)
        for other in range(4):  # counted, not sorted: numba takes seconds to compile a sort
            number = uniform(stream, _ORDER + other)
            place += number < own or (number == own and other < part)
        centre = 0.0 if part == 3 else 1.0
        low = -strength[part] if part == 3 else max(0.0, centre - strength[part])
        sampled[place, 0] = part
        sampled[place, 1] = low + (centre + strength[part] - low) * uniform(stream, _STRENGTH + part)
    return sampled


@jit
def sample_sigma(stream):
    """The blur's standard deviation in pixels: uniform from 0.1 to 2, torchvision's default."""
    return 0.1 + 1.9 * uniform(stream, _SIGMA)


@jit
def _jitter(values, part, factor, scratch):
    if part == 3:
        if factor != 0.0:
            turn_hue(values, factor)
    elif factor != 1.0:  # 1 changes nothing
        if part == 0:
            brightness(values, factor, scratch.table)
        elif part == 1:
            contrast(values, factor, scratch.table)
        else:
            color(values, factor, scratch.tables)


@jit_noalias
def turn_hue(values, turn):
    """`torchvision.transforms.functional.adjust_hue` by `turn`, -0.5 to 0.5 turns of the colour circle."""
    added = np.uint8(np.int32(turn * 255) & 255)
    for i in range(0, values.size, 3):
        hue, saturation, value = _to_hsv(values[i], values[i + 1], values[i + 2])
        red, green, blue = _to_rgb(np.uint8(hue + added), saturation, value)
        values[i], values[i + 1], values[i + 2] = red, green, blue


@jit_noalias
def _to_hsv(red, green, blue):
    greatest, least = max(red, green, blue), min(red, green, blue)
    if greatest == least:
        return np.uint8(0), np.uint8(0), greatest
    spread = np.float32(np.int32(greatest) - np.int32(least))
    from_red = np.float32(np.int32(greatest) - np.int32(red)) / spread
    from_green = np.float32(np.int32(greatest) - np.int32(green)) / spread
    from_blue = np.float32(np.int32(greatest) - np.int32(blue)) / spread
    if red == greatest:
        hue = np.float32(from_blue - from_green)
    elif green == greatest:
        hue = np.float32(2.0 + np.float64(from_red) - np.float64(from_blue))
    else:
        hue = np.float32(4.0 + np.float64(from_green) - np.float64(from_red))
    turned = np.float64(hue) / 6.0 + 1.0  # positive
    hue = np.float32(turned - math.floor(turned))
    saturation = np.float64(np.float32(spread / np.float32(greatest)))
    return np.uint8(np.int32(np.float64(hue) * 255.0)), np.uint8(np.int32(saturation * 255.0)), greatest


@jit_noalias
def _to_rgb(hue, saturation, value):
    if saturation == 0:
        return value, value, value
    sixths = np.float64(np.float32(hue)) * 6.0 / 255.0
    sector = np.int32(math.floor(sixths))
    part = np.float64(np.float32(sixths - np.float64(np.float32(sector))))
    fraction, full = np.float64(np.float32(np.float64(saturation) / 255.0)), np.float64(value)
    low = _nearest(full * (1.0 - fraction))
    falling = _nearest(full * (1.0 - fraction * part))
    rising = _nearest(full * (1.0 - fraction * (1.0 - part)))
    sector %= np.int32(6)
    if sector == 0:
        return value, rising, low
    if sector == 1:
        return falling, value, low
    if sector == 2:
        return low, value, rising
    if sector == 3:
        return low, falling, value
    if sector == 4:
        return rising, low, value
    return value, low, falling


@jit_noalias
def _nearest(number):
    """C's `round` of a positive number: halves are rounded up."""
    return np.uint8(np.int32(math.floor(number + 0.5)))
