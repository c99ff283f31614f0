"""Operations on each value or pixel alone: in place on uint8 values, bit-identical to Pillow 13 as timm calls it.

Arithmetic is computed, eight to sixty-four values at a time, several times faster than a table. Autocontrast and
equalize depend on the whole image and need tables (pipeline/native/tables.c).

Pillow blends in single precision, a + factor (b - a), truncates and clips. Its luma (Convert.c) is
(19595 R + 38470 G + 7471 B + 2^15) >> 16. The C library does the same faster (pipeline/native/blend.c).
"""

import numpy as np
from numba import types

from widemix.data.compiled import jit_inline, jit_noalias, optional_symbol


@jit_noalias
def invert(values):
    """255 - v, `ImageOps.invert`."""
    for i in range(values.size):
        values[i] = np.uint8(255) - values[i]


@jit_noalias
def posterize(values, bits):
    """Keep the `bits` highest bits, `ImageOps.posterize`. Without any it is black, where Pillow 13 raises."""
    if bits < 8:
        mask = np.uint8(255 & ~((1 << (8 - max(bits, 0))) - 1))
        for i in range(values.size):
            values[i] = values[i] & mask


@jit_noalias
def solarize(values, threshold):
    """Invert values from the threshold on, `ImageOps.solarize`."""
    if threshold < 256:
        least = np.uint8(max(threshold, 0))
        for i in range(values.size):
            value = values[i]
            values[i] = value if value < least else np.uint8(255) - value


@jit_noalias
def solarize_add(values, amount):
    """Add to values under 128, at most up to 255; timm's `solarize_add`."""
    added = np.uint8(amount)
    for i in range(values.size):
        value = values[i]
        total = np.uint8(value + added)
        total = total if total >= value else np.uint8(255)
        values[i] = total if value < np.uint8(128) else value


@jit_noalias
def stretch_tables(image, rows, tables):
    """Fill the tables of `ImageOps.autocontrast`; false where nothing would change.

    Image [H, 3 W], rows [2, 3 W], tables [3, 256].
    """
    low, high = rows[0], rows[1]
    for i in range(low.size):
        low[i], high[i] = 255, 0
    for y in range(image.shape[0]):
        _extremes(image[y], low, high)
    whole = True
    for channel in range(3):
        least, greatest = 255, 0
        for i in range(channel, low.size, 3):
            least, greatest = min(least, low[i]), max(greatest, high[i])
        whole &= least == 0 and greatest == 255
        _stretch_table(least, greatest, tables[channel])
    return not whole


@jit_noalias
def _extremes(row, low, high):
    for i in range(row.size):
        low[i] = min(low[i], row[i])
        high[i] = max(high[i], row[i])


@jit_noalias
def _stretch_table(least, greatest, table):
    scale = 255.0 / (greatest - least) if greatest > least else 1.0
    offset = -least * scale if greatest > least else 0.0
    for value in range(256):
        table[value] = min(max(int(value * scale + offset), 0), 255)


@jit_noalias
def refine_tables(counts, equal, tables, seen, table):
    """Compose `tables` with `ImageOps.equalize` of their result, or if not `equal` with `ImageOps.autocontrast`.

    Counts int32 [3, 256] is the histogram of the image before the tables, seen int32 [256] and table uint8 [256]
    are scratch.
    """
    for channel in range(3):
        for value in range(256):
            seen[value] = 0
        for value in range(256):
            seen[tables[channel, value]] += counts[channel, value]
        if equal:
            _equal_table(seen, table)
        else:
            least, greatest = 0, 255
            while seen[least] == 0:
                least += 1
            while seen[greatest] == 0:
                greatest -= 1
            _stretch_table(least, greatest, table)
        for value in range(256):
            tables[channel, value] = table[tables[channel, value]]


@jit_noalias
def identity_tables(tables):
    """Fill tables that change nothing."""
    for channel in range(3):
        for value in range(256):
            tables[channel, value] = np.uint8(value)


@jit_noalias
def _equal_table(count, table):
    total, last = 0, 0
    for value in range(256):
        total += count[value]
        last = count[value] if count[value] else last
    step = (total - last) // 255
    reached = step // 2
    for value in range(256):
        table[value] = min(reached // step, 255) if step else value
        reached += count[value]


_count_values = optional_symbol("count_values", types.int32(types.intp, types.int64, types.intp))
_look_up = optional_symbol("look_up", types.int32(types.intp, types.int64, types.intp))
_look_up_one = optional_symbol("look_up_one", types.int32(types.intp, types.int64, types.intp))


@jit_noalias
def count_values(values, counts):
    """Fill counts int32 [3, 256] with the three channels' histograms."""
    if not _count_values(values.ctypes.data, values.size, counts.ctypes.data):
        counts[:] = 0
        for i in range(values.size):
            counts[i % 3, values[i]] += 1


@jit_noalias
def look_up(values, tables):
    """Replace each value by that of its channel's table."""
    if not _look_up(values.ctypes.data, values.size, tables.ctypes.data):
        red, green, blue = tables[0], tables[1], tables[2]
        for i in range(0, values.size, 3):
            values[i], values[i + 1], values[i + 2] = red[values[i]], green[values[i + 1]], blue[values[i + 2]]


@jit_noalias
def look_up_one(values, table):
    """Replace each value by that of one table uint8 [256]; false, with nothing done, where there is no fast code."""
    return _look_up_one(values.ctypes.data, values.size, table.ctypes.data)


@jit_noalias
def copy_values(values, target):
    """Copy `values` to `target`."""
    for i in range(values.size):
        target[i] = values[i]


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
