"""Operations on each value alone: in place on uint8 values, bit-identical to Pillow 13 as timm calls it.

Where a value's image is arithmetic it is computed: eight to sixty-four values at a time, several times faster than
a table. Autocontrast and equalize look at the whole picture first and then need one.
"""

import numpy as np

from pipeline.data.compiled import pixels


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
def autocontrast(picture, rows, tables):
    """Stretch each channel over 0 to 255, `ImageOps.autocontrast`. Picture [H, 3 W], rows [2, 3 W]."""
    low, high = rows[0], rows[1]
    low[:] = 255
    high[:] = 0
    for y in range(picture.shape[0]):
        _extremes(picture[y], low, high)
    whole = True
    for channel in range(3):
        least, greatest = 255, 0
        for i in range(channel, low.size, 3):
            least, greatest = min(least, low[i]), max(greatest, high[i])
        whole &= least == 0 and greatest == 255
        _stretch_table(least, greatest, tables[channel])
    if not whole:
        _look_up(picture.reshape(-1), tables[0], tables[1], tables[2])


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
def equalize(values, counts, tables):
    """Spread each channel's histogram evenly, `ImageOps.equalize`. Counts int32 [6, 256]."""
    _count(values, counts)
    for channel in range(3):
        _equal_table(counts[channel], tables[channel])
    _look_up(values, tables[0], tables[1], tables[2])


@pixels
def _count(values, counts):
    """The three channels' histograms into the first three rows. Two sets, since neighbours are often equal."""
    counts[:] = 0
    even = values.size // 6 * 6
    for i in range(0, even, 6):
        for k in range(6):
            counts[k, values[i + k]] += 1
    for i in range(even, values.size):
        counts[i - even, values[i]] += 1
    for channel in range(3):
        for value in range(256):
            counts[channel, value] += counts[channel + 3, value]


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


@pixels
def _look_up(values, red, green, blue):
    for i in range(0, values.size, 3):
        values[i], values[i + 1], values[i + 2] = red[values[i]], green[values[i + 1]], blue[values[i + 2]]
