"""One operation on one picture, by number: what a drawn policy asks for."""

import numpy as np

from pipeline.data.augment.affine import rotation, transform
from pipeline.data.augment.blend import brightness, color, contrast
from pipeline.data.augment.filters import gaussian_blur, sharpness
from pipeline.data.augment.tables import autocontrast, equalize, invert, posterize, solarize, solarize_add
from pipeline.data.compiled import jit

AUTOCONTRAST, EQUALIZE, INVERT, POSTERIZE, SOLARIZE, SOLARIZE_ADD = range(6)
COLOR, CONTRAST, BRIGHTNESS, SHARPNESS, BLUR = range(6, 11)
ROTATE, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, TRANSLATE_X_REL, TRANSLATE_Y_REL = range(11, 18)


@jit
def apply(picture, operation, argument, cubic, fill, scratch):
    """Do `operation` to picture uint8 [H, W, 3] in place, with timm's argument of it: bits, factor, degrees, ...

    `cubic` (else linear) and `fill`, R | G << 8 | B << 16, matter where pixels move. Translations are in pixels, or
    with `_REL` in shares of the side.
    """
    rows, values = picture.reshape(picture.shape[0], -1), picture.reshape(-1)
    if operation == AUTOCONTRAST:
        autocontrast(rows, scratch.rows, scratch.tables)
    elif operation == EQUALIZE:
        equalize(values, scratch.counts, scratch.tables)
    elif operation == INVERT:
        invert(values)
    elif operation == POSTERIZE:
        posterize(values, int(argument))
    elif operation == SOLARIZE:
        solarize(values, int(argument))
    elif operation == SOLARIZE_ADD:
        solarize_add(values, int(argument))
    elif operation == COLOR:
        color(values, argument)
    elif operation == CONTRAST:
        contrast(values, argument)
    elif operation == BRIGHTNESS:
        brightness(values, argument)
    elif operation == SHARPNESS:
        sharpness(rows, argument, scratch.rows)
    elif operation == BLUR:
        gaussian_blur(rows, argument, scratch.sums, scratch.rows, scratch.copy)
    elif operation != ROTATE or argument % 360.0 != 0.0:
        matrix = _matrix(operation, argument, picture.shape[0], picture.shape[1])
        _move(rows, matrix, cubic, fill, scratch)


@jit
def _matrix(operation, argument, height, width):
    """timm's matrix of output to source points, in Pillow's order of coefficients."""
    if operation == ROTATE:
        return rotation(argument, height, width)
    if operation == SHEAR_X:
        return 1.0, argument, 0.0, 0.0, 1.0, 0.0
    if operation == SHEAR_Y:
        return 1.0, 0.0, 0.0, argument, 1.0, 0.0
    if operation in (TRANSLATE_X, TRANSLATE_X_REL):
        return 1.0, 0.0, argument * (width if operation == TRANSLATE_X_REL else 1), 0.0, 1.0, 0.0
    return 1.0, 0.0, 0.0, 0.0, 1.0, argument * (height if operation == TRANSLATE_Y_REL else 1)


@jit
def _move(rows, matrix, cubic, fill, scratch):
    places = scratch.corner, scratch.shift, scratch.inside, scratch.line
    transform(rows, matrix, cubic, np.uint32(fill), scratch.padded, *places)
