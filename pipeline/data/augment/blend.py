"""`ImageEnhance` and `Image.blend`: in place on uint8 pictures, bit-identical to Pillow 13.

Pillow blends in single precision, a + factor (b - a), cuts the fraction off and clips. Its luma (Convert.c) is
(19595 R + 38470 G + 7471 B + 2^15) >> 16.
"""

import numpy as np

from pipeline.data.compiled import inlined, pixels


@inlined
def blended(base, difference, factor):
    """One value: `base` + `factor` x `difference`, clipped and cut to uint8."""
    value = np.float32(base) + factor * np.float32(difference)
    return np.uint8(np.int32(min(max(value, np.float32(0)), np.float32(255))))


@inlined
def luma(red, green, blue):
    """Pillow's `L` of one pixel, int32."""
    total = np.int32(red) * np.int32(19595) + np.int32(green) * np.int32(38470) + np.int32(blue) * np.int32(7471)
    return (total + np.int32(0x8000)) >> np.int32(16)


@pixels
def brightness(values, factor):
    """Away from black or towards it, `ImageEnhance.Brightness`."""
    _away_from(values, np.int32(0), np.float32(factor))


@pixels
def contrast(values, factor):
    """Away from the mean luma or towards it, `ImageEnhance.Contrast`."""
    total = np.int64(0)
    for i in range(values.size // 3):
        total += luma(values[3 * i], values[3 * i + 1], values[3 * i + 2])
    _away_from(values, np.int32(total / (values.size // 3) + 0.5), np.float32(factor))


@pixels
def _away_from(values, grey, factor):
    for i in range(values.size):
        values[i] = blended(grey, np.int32(values[i]) - grey, factor)


@pixels
def color(values, factor):
    """Away from each pixel's own grey or towards it, `ImageEnhance.Color`; 0 is grayscale."""
    share = np.float32(factor)
    for i in range(values.size // 3):
        red, green, blue = np.int32(values[3 * i]), np.int32(values[3 * i + 1]), np.int32(values[3 * i + 2])
        grey = luma(red, green, blue)
        values[3 * i] = blended(grey, red - grey, share)
        values[3 * i + 1] = blended(grey, green - grey, share)
        values[3 * i + 2] = blended(grey, blue - grey, share)


@pixels
def blend(values, others, factor):
    """`values` towards `others`, `Image.blend(values, others, factor)`."""
    share = np.float32(factor)
    for i in range(values.size):
        values[i] = blended(values[i], np.int32(others[i]) - np.int32(values[i]), share)
