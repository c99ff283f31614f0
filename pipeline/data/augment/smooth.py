"""torchvision's `GaussianBlur(23)`, which timm's `gaussian_blur_prob` uses: a true Gaussian, not Pillow's boxes.

torchvision convolves with 23 x 23 taps in single precision; this does rows, then columns, and omits taps that are too
small to matter. Halves may be rounded the other way: differences of 1 in fewer than 1 value of 10,000, see the test.
"""

import math

import numpy as np

from widemix.data.compiled import jit, jit_noalias

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
                _add(wide[3 * k : 3 * k + sums.size], taps[k], between[y])
    for y in range(height):
        _clear(sums)
        for k in range(len(taps)):
            if taps[k] > _NEGLIGIBLE:
                _add(between[_mirrored(y + k - REACH, height)], taps[k], sums)
        _store(sums, image[y])


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
def _add(source, weight, sums):
    for i in range(sums.size):
        sums[i] += weight * source[i]


@jit_noalias
def _store(sums, row):
    for i in range(sums.size):
        row[i] = np.uint8(np.int32(np.rint(min(sums[i], np.float32(255)))))
