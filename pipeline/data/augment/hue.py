"""torchvision's change of hue, through Pillow's eight-bit HSV: in place, bit-identical to Pillow 13 (Convert.c)."""

import math

import numpy as np

from widemix.data.compiled import jit_noalias


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
