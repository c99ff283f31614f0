"""Applies operations, given by number, to one image: the compiled dispatch of a sampled chain of steps.

Rotate, shear and translate are here too: in place on uint8 images, bit-identical to Pillow 13's `Image.transform`.
Pillow (Geometry.c) computes the source point of each output pixel's centre in double precision, fills where it is
outside, and interpolates with edges repeated; the result is truncated, not rounded. pipeline/native/move.c does so,
and `transform_plainly` where it cannot be built: the same, bit for bit, several times slower.
"""

import math

import numpy as np
from numba import types

from widemix.data.augment import registry as op
from widemix.data.augment.filters import gaussian_blur, sharpness
from widemix.data.augment.values import (
    brightness,
    color,
    contrast,
    count_values,
    identity_tables,
    invert,
    look_up,
    posterize,
    refine_tables,
    solarize,
    solarize_add,
    stretch_tables,
)
from widemix.data.compiled import jit, jit_inline, jit_noalias, native_symbol


@jit
def apply(image, operation, argument, cubic, fill, scratch):
    """Apply one operation to image uint8 [H, W, 3] in place. The argument is timm's: bits, factor, degrees, ...

    `cubic` (else bilinear) and `fill`, R | G << 8 | B << 16, matter where pixels move. Translations are in pixels, or
    with `_REL` in fractions of the side.
    """
    chain = np.empty((1, 3))
    chain[0, 0], chain[0, 1], chain[0, 2] = operation, argument, cubic
    apply_chain(image, chain, fill, scratch)


@jit_inline
def apply_chain(image, chain, fill, scratch):
    """Apply the steps of chain [n, 3] (operation or SKIP, argument, cubic) to image in place.

    Autocontrast and equalize are tables of 256 values a channel. Operations that follow and change each value by
    itself are applied to the tables; the histogram and the look-up are then needed once for all of them. Without a
    table, changing the image (2 to 4 us at 224 x 224) is faster than its histogram for one (45 us).
    """
    rows, values, tables = image.reshape(image.shape[0], -1), image.reshape(-1), scratch.tables
    pending, counted = False, False  # there are tables still to be applied; the histogram is known
    for k in range(len(chain)):
        operation, argument = int(chain[k, 0]), chain[k, 1]
        if operation == op.SKIP:
            continue
        if operation == op.AUTOCONTRAST and not pending:
            pending = stretch_tables(rows, scratch.rows, tables)
        elif operation in (op.AUTOCONTRAST, op.EQUALIZE):
            if not pending:
                identity_tables(tables)
            if not counted:
                count_values(values, scratch.counts)
            refine_tables(scratch.counts, operation == op.EQUALIZE, tables, scratch.seen, scratch.table)
            pending, counted = True, True
        elif operation <= op.BRIGHTNESS:
            _change_values(tables.reshape(-1) if pending else values, operation, argument, scratch.table)
        else:
            if pending:
                look_up(values, tables)
                pending, counted = False, False
            _change_pixels(rows, values, operation, argument, chain[k, 2] != 0.0, fill, scratch)
    if pending:
        look_up(values, tables)


@jit_inline
def _change_values(values, operation, argument, table):
    if operation == op.INVERT:
        invert(values)
    elif operation == op.POSTERIZE:
        posterize(values, int(argument))
    elif operation == op.SOLARIZE:
        solarize(values, int(argument))
    elif operation == op.SOLARIZE_ADD:
        solarize_add(values, int(argument))
    else:
        brightness(values, argument, table)


@jit_inline
def _change_pixels(rows, values, operation, argument, cubic, fill, scratch):
    if operation == op.COLOR:
        color(values, argument, scratch.tables)
    elif operation == op.CONTRAST:
        contrast(values, argument, scratch.table)
    elif operation == op.SHARPNESS:
        sharpness(rows, argument, scratch.rows, scratch.columns, scratch.tables)
    elif operation == op.BLUR:
        gaussian_blur(rows, argument, scratch.sums, scratch.rows, scratch.copy)
    elif operation != op.ROTATE or argument % 360.0 != 0.0:
        transform(rows, _matrix(operation, argument, len(rows), rows.shape[1] // 3), cubic, np.uint32(fill), scratch)


@jit
def _matrix(operation, argument, height, width):
    """timm's affine matrix from output to source points, in Pillow's order of coefficients."""
    if operation == op.ROTATE:
        return rotation(argument, height, width)
    if operation == op.SHEAR_X:
        return 1.0, argument, 0.0, 0.0, 1.0, 0.0
    if operation == op.SHEAR_Y:
        return 1.0, 0.0, 0.0, argument, 1.0, 0.0
    if operation in (op.TRANSLATE_X, op.TRANSLATE_X_REL):
        return 1.0, 0.0, argument * (width if operation == op.TRANSLATE_X_REL else 1), 0.0, 1.0, 0.0
    return 1.0, 0.0, 0.0, 0.0, 1.0, argument * (height if operation == op.TRANSLATE_Y_REL else 1)


_LOW = -3768320.0  # the part of 1e15 below its highest 26 bits


@jit_noalias
def rotation(degrees, height, width):
    """`Image.rotate`'s matrix (a, b, c, d, e, f): output (x, y) reads from (ax + by + c, dx + ey + f)."""
    angle = -math.radians(degrees % 360.0)
    cos, sin, back = _round15(math.cos(angle)), _round15(math.sin(angle)), _round15(-math.sin(angle))
    x, y = width / 2, height / 2
    return cos, sin, cos * -x + sin * -y + 0.0 + x, back, cos, back * -x + cos * -y + 0.0 + y


@jit_noalias
def _round15(number):
    """Python's round(number, 15) for |number| <= 1; the product's rounding error decides near a half."""
    scaled = number * 1e15
    split = number * 134217729.0  # Veltkamp and Dekker: halves of 26 bits, whose products are exact
    high = split - (split - number)
    low, big, small = number - high, 1e15 - _LOW, _LOW
    rest = ((high * big - scaled) + high * small + low * big) + low * small
    whole = np.rint(scaled)
    off = (scaled - whole) + rest
    if off > 0.5:
        whole += 1.0
    elif off < -0.5:
        whole -= 1.0
    return whole / 1e15


@jit
def transform_plainly(image, matrix, cubic, fill, scratch):
    """Transform image [H, 3 W] by `matrix` in place; bicubic or bilinear; `fill` is R | G << 8 | B << 16."""
    a, b, c, d, e, f = matrix
    source, height, width = scratch.copy, image.shape[0], image.shape[1] // 3
    source[:] = image
    for row in range(height):
        for column in range(width):
            x, y = a * (column + 0.5) + b * (row + 0.5) + c, d * (column + 0.5) + e * (row + 0.5) + f
            within = x >= 0.0 and x < width and y >= 0.0 and y < height
            for channel in range(3):
                value = np.uint8((fill >> (8 * channel)) & 255)
                if within:
                    value = _interpolated(source, x - 0.5, y - 0.5, channel, cubic)
                image[row, 3 * column + channel] = value


@jit
def _interpolated(source, x, y, channel, cubic):
    left, top = math.floor(x), math.floor(y)
    rows = np.empty(4)
    for k in range(4):
        row = source[min(max(int(top) + k - 1, 0), len(source) - 1)]
        rows[k] = _between(*_taps(row, int(left), channel), x - left, cubic)
    return np.uint8(min(max(_between(rows[0], rows[1], rows[2], rows[3], y - top, cubic), 0.0), 255.0))


@jit
def _taps(row, left, channel):
    """The four neighbouring pixels, edges repeated."""
    last = row.size // 3 - 1
    before, center = 3 * min(max(left - 1, 0), last), 3 * min(max(left, 0), last)
    after, beyond = 3 * min(max(left + 1, 0), last), 3 * min(max(left + 2, 0), last)
    return (
        np.float64(row[before + channel]),
        np.float64(row[center + channel]),
        np.float64(row[after + channel]),
        np.float64(row[beyond + channel]),
    )


@jit
def _between(v0, v1, v2, v3, x, cubic):
    """Interpolated between v1 and v2; Pillow's cubic has a = -1."""
    if not cubic:
        return v1 + (v2 - v1) * x
    p2, p3, p4 = -v0 + v2, 2 * (v0 - v1) + v2 - v3, -v0 + v1 - v2 + v3
    return v1 + x * (p2 + x * (p3 + x * p4))


_POINTER_AND_SIZES = (types.intp, types.int64, types.int64)
_move_pixels = native_symbol(
    "move_pixels", types.int32(*_POINTER_AND_SIZES, *[types.float64] * 6, *[types.int64] * 2)
)


@jit
def _transform_natively(image, matrix, cubic, fill, scratch):
    a, b, c, d, e, f = matrix
    height, width = image.shape[0], image.shape[1] // 3
    if not _move_pixels(image.ctypes.data, height, width, a, b, c, d, e, f, int(cubic), int(fill)):
        raise MemoryError


transform = _transform_natively if _move_pixels else transform_plainly
