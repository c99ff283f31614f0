"""Operations on each value alone: in place on uint8 values, bit-identical to Pillow 13 as timm calls it.

Where a value's image is arithmetic it is computed: eight to sixty-four values at a time, several times faster than
a table. Autocontrast and equalize look at the whole picture first and then need one (pipeline/native/tables.c).
"""

import numpy as np
from numba import types

from pipeline.data.compiled import pixels, quick_symbol


@pixels
def invert(values):
    """255 - v, `ImageOps.invert`."""
    for i in range(values.size):
        values[i] = np.uint8(255) - values[i]


@pixels
def posterize(values, bits):
    """Keep the `bits` highest bits, `ImageOps.posterize`. None left is black; Pillow 13 raises there."""
    if bits < 8:
        mask = np.uint8(255 & ~((1 << (8 - max(bits, 0))) - 1))
        for i in range(values.size):
            values[i] = values[i] & mask


@pixels
def solarize(values, threshold):
    """Invert what reaches the threshold, `ImageOps.solarize`."""
    if threshold < 256:
        least = np.uint8(max(threshold, 0))
        for i in range(values.size):
            value = values[i]
            values[i] = value if value < least else np.uint8(255) - value


@pixels
def solarize_add(values, amount):
    """Add to values under 128, at most up to 255; timm's `solarize_add`."""
    added = np.uint8(amount)
    for i in range(values.size):
        value = values[i]
        total = np.uint8(value + added)
        total = total if total >= value else np.uint8(255)
        values[i] = total if value < np.uint8(128) else value


@pixels
def stretch_tables(picture, rows, tables):
    """Tables that stretch each channel over 0 to 255, `ImageOps.autocontrast`; false where nothing would change.

    Picture [H, 3 W], rows [2, 3 W], tables [3, 256].
    """
    low, high = rows[0], rows[1]
    for i in range(low.size):
        low[i], high[i] = 255, 0
    for y in range(picture.shape[0]):
        _extremes(picture[y], low, high)
    whole = True
    for channel in range(3):
        least, greatest = 255, 0
        for i in range(channel, low.size, 3):
            least, greatest = min(least, low[i]), max(greatest, high[i])
        whole &= least == 0 and greatest == 255
        _stretch_table(least, greatest, tables[channel])
    return not whole


@pixels
def _extremes(row, low, high):
    for i in range(row.size):
        low[i] = min(low[i], row[i])
        high[i] = max(high[i], row[i])


@pixels
def _stretch_table(least, greatest, table):
    scale = 255.0 / (greatest - least) if greatest > least else 1.0
    offset = -least * scale if greatest > least else 0.0
    for value in range(256):
        table[value] = min(max(int(value * scale + offset), 0), 255)


@pixels
def refine_tables(counts, equal, tables, seen, table):
    """Tables that first do what `tables` say, then equalize (`ImageOps.equalize`), or else autocontrast, the result.

    Counts int32 [3, 256] are those of the picture before, seen int32 [256] and table uint8 [256] scratch.
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


@pixels
def plain_tables(tables):
    """Tables that change nothing."""
    for channel in range(3):
        for value in range(256):
            tables[channel, value] = np.uint8(value)


@pixels
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


_count_values = quick_symbol("count_values", types.int32(types.intp, types.int64, types.intp))
_look_up = quick_symbol("look_up", types.int32(types.intp, types.int64, types.intp))
_look_up_one = quick_symbol("look_up_one", types.int32(types.intp, types.int64, types.intp))


@pixels
def count_values(values, counts):
    """The three channels' histograms, int32 [3, 256]."""
    if not _count_values(values.ctypes.data, values.size, counts.ctypes.data):
        counts[:] = 0
        for i in range(values.size):
            counts[i % 3, values[i]] += 1


@pixels
def look_up(values, tables):
    """Each value in the table of its channel."""
    if not _look_up(values.ctypes.data, values.size, tables.ctypes.data):
        red, green, blue = tables[0], tables[1], tables[2]
        for i in range(0, values.size, 3):
            values[i], values[i + 1], values[i + 2] = red[values[i]], green[values[i + 1]], blue[values[i + 2]]


@pixels
def look_up_one(values, table):
    """All in the same table uint8 [256]; false where this processor is not made for it, and nothing is done."""
    return _look_up_one(values.ctypes.data, values.size, table.ctypes.data)


@pixels
def copy_values(values, target):
    for i in range(values.size):
        target[i] = values[i]
