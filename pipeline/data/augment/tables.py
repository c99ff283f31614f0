"""Operations on each value alone: in place on uint8 values, bit-identical to Pillow 13 as timm calls it.

Arithmetic is computed, eight to sixty-four values at a time, several times faster than a table. Autocontrast and
equalize depend on the whole image and need tables (pipeline/native/tables.c).
"""

import numpy as np
from numba import types

from widemix.data.compiled import jit_noalias, optional_symbol


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
