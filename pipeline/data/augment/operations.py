"""Applies operations, given by number, to one image: the compiled dispatch of a sampled chain of steps."""

import numpy as np

from widemix.data.augment.affine import rotation, transform
from widemix.data.augment.blend import brightness, color, contrast
from widemix.data.augment.filters import gaussian_blur, sharpness
from widemix.data.augment.registry import (
    AUTOCONTRAST,
    BLUR,
    BRIGHTNESS,
    COLOR,
    CONTRAST,
    EQUALIZE,
    INVERT,
    POSTERIZE,
    ROTATE,
    SHARPNESS,
    SHEAR_X,
    SHEAR_Y,
    SKIP,
    SOLARIZE,
    SOLARIZE_ADD,
    TRANSLATE_X,
    TRANSLATE_X_REL,
    TRANSLATE_Y_REL,
)
from widemix.data.augment.tables import (
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
from widemix.data.compiled import jit, jit_inline


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
        if operation == SKIP:
            continue
        if operation == AUTOCONTRAST and not pending:
            pending = stretch_tables(rows, scratch.rows, tables)
        elif operation in (AUTOCONTRAST, EQUALIZE):
            if not pending:
                identity_tables(tables)
            if not counted:
                count_values(values, scratch.counts)
            refine_tables(scratch.counts, operation == EQUALIZE, tables, scratch.seen, scratch.table)
            pending, counted = True, True
        elif operation <= BRIGHTNESS:
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
    if operation == INVERT:
        invert(values)
    elif operation == POSTERIZE:
        posterize(values, int(argument))
    elif operation == SOLARIZE:
        solarize(values, int(argument))
    elif operation == SOLARIZE_ADD:
        solarize_add(values, int(argument))
    else:
        brightness(values, argument, table)


@jit_inline
def _change_pixels(rows, values, operation, argument, cubic, fill, scratch):
    if operation == COLOR:
        color(values, argument, scratch.tables)
    elif operation == CONTRAST:
        contrast(values, argument, scratch.table)
    elif operation == SHARPNESS:
        sharpness(rows, argument, scratch.rows, scratch.columns, scratch.tables)
    elif operation == BLUR:
        gaussian_blur(rows, argument, scratch.sums, scratch.rows, scratch.copy)
    elif operation != ROTATE or argument % 360.0 != 0.0:
        transform(rows, _matrix(operation, argument, len(rows), rows.shape[1] // 3), cubic, np.uint32(fill), scratch)


@jit
def _matrix(operation, argument, height, width):
    """timm's affine matrix from output to source points, in Pillow's order of coefficients."""
    if operation == ROTATE:
        return rotation(argument, height, width)
    if operation == SHEAR_X:
        return 1.0, argument, 0.0, 0.0, 1.0, 0.0
    if operation == SHEAR_Y:
        return 1.0, 0.0, 0.0, argument, 1.0, 0.0
    if operation in (TRANSLATE_X, TRANSLATE_X_REL):
        return 1.0, 0.0, argument * (width if operation == TRANSLATE_X_REL else 1), 0.0, 1.0, 0.0
    return 1.0, 0.0, 0.0, 0.0, 1.0, argument * (height if operation == TRANSLATE_Y_REL else 1)
