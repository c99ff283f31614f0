"""`ImageEnhance` and `Image.blend`: in place on uint8 images, bit-identical to Pillow 13.

Pillow blends in single precision, a + factor (b - a), truncates and clips. Its luma (Convert.c) is
(19595 R + 38470 G + 7471 B + 2^15) >> 16. The C library does the same faster (pipeline/native/blend.c).
"""

import numpy as np
from numba import types

from widemix.data.augment.tables import look_up_one
from widemix.data.compiled import jit_inline, jit_noalias, optional_symbol

_sum_luma = optional_symbol("sum_luma", types.int64(types.intp, types.int64))
_blend_with_luma = optional_symbol("blend_with_luma", types.int32(types.intp, types.int64, types.float32, types.intp))


@jit_inline
def blended(base, difference, factor):
    """`base` + `factor` x `difference` of one value, clipped and truncated to uint8."""
    value = np.float32(base) + factor * np.float32(difference)
    return np.uint8(np.int32(min(max(value, np.float32(0)), np.float32(255))))


@jit_inline
def luma(red, green, blue):
    """Pillow's `L` of one pixel, int32."""
    total = np.int32(red) * np.int32(19595) + np.int32(green) * np.int32(38470) + np.int32(blue) * np.int32(7471)
    return (total + np.int32(0x8000)) >> np.int32(16)


@jit_noalias
def blend_tables(factor, tables):
    """Fill uint8 [2 or more, 256]: how far a blend is above (or below) its base, by how far the value is.

    Returns whether the tables are exact. They are not where rounding the sum of base and difference may reach the
    next whole number, which is half of the last of 24 bits away, 2^-17 below 256; nor for negative factors.
    """
    exact = factor >= np.float32(0)
    for value in range(256):
        moved = factor * np.float32(value)
        whole = np.floor(moved)
        part = moved - whole
        exact &= part == 0 or (part > np.float32(2**-16) and part < np.float32(1 - 2**-16))
        tables[0, value] = np.uint8(min(whole, np.float32(255)))
        tables[1, value] = np.uint8(min(np.ceil(moved), np.float32(255)))
    return exact


@jit_noalias
def brightness(values, factor, table):
    """Blend with black, `ImageEnhance.Brightness`. Table uint8 [256] is scratch."""
    _blend_with_gray(values, np.int32(0), np.float32(factor), table)


@jit_noalias
def contrast(values, factor, table):
    """Blend with the mean luma, `ImageEnhance.Contrast`. Table uint8 [256] is scratch."""
    total = np.int64(_sum_luma(values.ctypes.data, values.size))
    if total == 0:  # no library, or black
        for i in range(values.size // 3):
            total += luma(values[3 * i], values[3 * i + 1], values[3 * i + 2])
    mean = total / (values.size // 3)
    _blend_with_gray(values, np.int32(mean + 0.5), np.float32(factor), table)


@jit_inline
def _blend_with_gray(values, grey, factor, table):
    for value in range(256):
        table[value] = blended(grey, np.int32(value) - grey, factor)
    if not look_up_one(values, table):
        for i in range(values.size):
            values[i] = blended(grey, np.int32(values[i]) - grey, factor)


@jit_noalias
def color(values, factor, tables):
    """Blend with each pixel's luma, `ImageEnhance.Color`; factor 0 is grayscale. Tables are scratch."""
    fraction = np.float32(factor)
    exact = tables.ctypes.data if blend_tables(fraction, tables) else 0
    if _blend_with_luma(values.ctypes.data, values.size, fraction, exact):
        return
    for i in range(values.size // 3):
        red, green, blue = np.int32(values[3 * i]), np.int32(values[3 * i + 1]), np.int32(values[3 * i + 2])
        grey = luma(red, green, blue)
        values[3 * i] = blended(grey, red - grey, fraction)
        values[3 * i + 1] = blended(grey, green - grey, fraction)
        values[3 * i + 2] = blended(grey, blue - grey, fraction)


@jit_noalias
def blend(values, others, factor):
    """`Image.blend(values, others, factor)`, into `values`."""
    fraction = np.float32(factor)
    for i in range(values.size):
        values[i] = blended(values[i], np.int32(others[i]) - np.int32(values[i]), fraction)
