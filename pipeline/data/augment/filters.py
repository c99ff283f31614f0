"""Operations over a neighbourhood: in place on uint8 images [H, 3 W], bit-identical to Pillow 13.

And torchvision's `GaussianBlur(23)`, which timm's `gaussian_blur_prob` uses: a true Gaussian, not Pillow's boxes.
torchvision convolves with 23 x 23 taps in single precision; `gaussian_smooth` does rows, then columns, and omits taps
that are too small to matter. Halves may be rounded the other way: differences of 1 in fewer than 1 value of 10,000,
see the test.
"""

import math

import numpy as np
from numba import types

from widemix.data.augment.values import blend_tables, blended, copy_values
from widemix.data.compiled import jit, jit_noalias, optional_symbol

_sharpen_image = optional_symbol(
    "sharpen", types.int32(types.intp, types.int64, types.int64, types.float32, types.intp, types.intp)
)


@jit_noalias
def sharpness(image, factor, rows, columns, tables):
    """Blend with a 3 x 3 mean, `ImageEnhance.Sharpness`; the outermost pixels do not change.

    Rows uint8 [2, 3 W], columns uint16 [9 W + 224] and tables uint8 [2 or more, 256] are scratch.
    """
    height, width = image.shape
    if height < 3 or width < 9:
        return
    fraction = np.float32(factor)
    exact = tables.ctypes.data if blend_tables(fraction, tables) else 0
    if _sharpen_image(image.ctypes.data, height, width, fraction, exact, columns.ctypes.data):
        return
    columns = columns[:width]
    copy_values(image[0], rows[0])
    for y in range(1, height - 1):
        above, center, below = rows[(y - 1) & 1], rows[y & 1], image[y + 1]
        copy_values(image[y], center)
        _add_three(above, center, below, columns)
        # Shifted views: for an index i - 3 numba would handle negative values, and LLVM would not vectorise.
        sides = columns[: width - 6], columns[3:-3], columns[6:width]
        _sharpen(sides[0], sides[1], sides[2], center[3:-3], image[y, 3:-3], fraction)


@jit_noalias
def _add_three(above, center, below, columns):
    for i in range(center.size):
        columns[i] = np.uint16(above[i]) + np.uint16(center[i]) + np.uint16(below[i])


@jit_noalias
def _sharpen(left, middle, right, center, out, factor):
    for i in range(out.size):
        # (nine + four times the middle) / 13, rounded, as Pillow's kernel gives it: exact up to 13 x 255
        twice = np.uint16(np.uint16(2) * (left[i] + middle[i] + right[i] + np.uint16(4) * center[i]) + np.uint16(13))
        mean = np.int32(np.uint16(np.uint32(twice) * np.uint32(40330) >> np.uint32(16)) >> np.uint16(4))
        out[i] = blended(mean, np.int32(center[i]) - mean, factor)


@jit_noalias
def gaussian_blur(image, sigma, sums, rows, copy):
    """Three box blurs in x and three in y, `ImageFilter.GaussianBlur(sigma)`. Sums [3 W], rows [2, 3 W].

    Box radius of a fraction: Gwosdek et al. 2011, "Theoretical foundations of Gaussian convolution by extended box
    filtering", equations 7, 11, 14, with Pillow's single precision and 24-bit fixed point (BoxBlur.c).
    """
    radius = _box_radius(np.float32(sigma))
    whole = int(radius)
    near = np.uint32(np.float32(1 << 24) / (radius * np.float32(2) + np.float32(1)))
    far = np.uint32((np.int64(1 << 24) - (2 * whole + 1) * np.int64(near)) // 2)
    if radius == 0:
        return
    for y in range(image.shape[0]):
        for _ in range(3):
            _box_row(image[y], whole, near, far, sums, rows[0])
    _box_columns(image, copy, whole, near, far, sums)
    _box_columns(copy, image, whole, near, far, sums)
    _box_columns(image, copy, whole, near, far, sums)
    for y in range(image.shape[0]):
        copy_values(copy[y], image[y])


@jit_noalias
def _box_radius(sigma):
    variance = sigma * sigma / np.float32(3)
    length = np.float32(np.sqrt(12.0 * np.float64(variance) + 1.0))
    whole = np.float32(np.floor((np.float64(length) - 1.0) / 2.0))
    part = (np.float32(2) * whole + np.float32(1)) * (whole * (whole + np.float32(1)) - np.float32(3) * variance)
    part /= np.float32(6) * (variance - (whole + np.float32(1)) * (whole + np.float32(1)))
    return whole + part


@jit_noalias
def _box_row(row, radius, near, far, sums, source):
    """One box blur along a row of pixels in place, the edge pixel repeated outside."""
    copy_values(row, source)
    sums[:] = 1 << 23
    for offset in range(-radius - 1, radius + 2):
        weight = far if abs(offset) > radius else near
        # the middle at once, and up to radius + 1 pixels at either end by themselves
        low, high = min(max(-3 * offset, 0), row.size), max(min(row.size - 3 * offset, row.size), 0)
        if high > low:
            _add(source[low + 3 * offset : high + 3 * offset], weight, sums[low:high])
        for i in range(min(low, row.size)):
            sums[i] += weight * np.uint32(source[i % 3])
        for i in range(max(high, 0), row.size):
            sums[i] += weight * np.uint32(source[row.size - 3 + i % 3])
    _store(sums, row)


@jit_noalias
def _box_columns(source, target, radius, near, far, sums):
    """One box blur along every column."""
    last = source.shape[0] - 1
    for y in range(source.shape[0]):
        sums[:] = 1 << 23
        for offset in range(-radius - 1, radius + 2):
            _add(source[min(max(y + offset, 0), last)], far if abs(offset) > radius else near, sums)
        _store(sums, target[y])


@jit_noalias
def _add(source, weight, sums):
    for i in range(sums.size):
        sums[i] += weight * np.uint32(source[i])


@jit_noalias
def _store(sums, target):
    for i in range(sums.size):
        target[i] = np.uint8(sums[i] >> np.uint32(24))


REACH = 11  # pixels on either side
_NEGLIGIBLE = 1e-7  # weight of a tap: times 255 it is far below half a level


@jit
def gaussian_smooth(image, sigma, taps, wide, between, sums):
    """Blur image uint8 [H, 3 W] in place, edges mirrored. Scratch float32: [23], [3 (W + 22)], [H, 3 W], [3 W]."""
    _fill_taps(taps, sigma)
    height = image.shape[0]
    for y in range(height):
        _mirror_ends(image[y], wide)
        _clear(between[y])
        for k in range(len(taps)):
            if taps[k] > _NEGLIGIBLE:
                _add_weighted(wide[3 * k : 3 * k + sums.size], taps[k], between[y])
    for y in range(height):
        _clear(sums)
        for k in range(len(taps)):
            if taps[k] > _NEGLIGIBLE:
                _add_weighted(between[_mirrored(y + k - REACH, height)], taps[k], sums)
        _store_rounded(sums, image[y])


@jit
def _fill_taps(taps, sigma):
    total = np.float32(0)
    for k in range(len(taps)):
        taps[k] = math.exp(-0.5 * ((k - REACH) / sigma) ** 2)
        total += taps[k]
    for k in range(len(taps)):
        taps[k] /= total


@jit
def _mirrored(place, size):
    """The index within the image after reflection about its outermost pixels."""
    period = max(2 * (size - 1), 1)
    place = abs(place) % period
    return min(place, period - place) if size > 1 else 0


@jit
def _mirror_ends(row, wide):
    width = row.size // 3
    _widen(row, wide[3 * REACH : 3 * (REACH + width)])
    for x in range(REACH):
        for outside in (x - REACH, width + x):
            inside = _mirrored(outside, width)
            for channel in range(3):
                wide[3 * (REACH + outside) + channel] = row[3 * inside + channel]


@jit_noalias
def _widen(row, wide):
    for i in range(row.size):
        wide[i] = np.float32(row[i])


@jit
def _clear(sums):
    """By a loop, as all here is: what NumPy broadcasts takes numba seconds to compile."""
    for i in range(sums.size):
        sums[i] = 0


@jit_noalias
def _add_weighted(source, weight, sums):
    for i in range(sums.size):
        sums[i] += weight * source[i]


@jit_noalias
def _store_rounded(sums, row):
    for i in range(sums.size):
        row[i] = np.uint8(np.int32(np.rint(min(sums[i], np.float32(255)))))
