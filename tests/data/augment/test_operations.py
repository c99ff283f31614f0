"""Every operation is Pillow's as timm calls it, bit for bit, over its whole range and on images of many sizes."""

import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clone import ROOT
from tests.data.augment.timms import OPERATIONS, PACKED, applied, by_timm, images_of
from widemix.data.augment import registry as op
from widemix.data.augment.batch import Scratch, scratch_for
from widemix.data.augment.filters import gaussian_smooth
from widemix.data.augment.operations import apply, rotation
from widemix.data.augment.values import blend_tables


def below(whole: int, distance: int) -> float:
    """A factor of which `distance` times is just below `whole`."""
    return float(np.nextafter(np.float32(whole) / np.float32(distance), np.float32(0)))


UNCERTAIN = [below(3, 7), below(2, 3), below(1, 255), 1e-7]
HARD = [*UNCERTAIN, below(17, 100), below(100, 3), below(508, 255), 0.0, 1.0]
SAMPLED = np.random.RandomState(0).uniform(0.0, 2.0, 200).tolist()
BLENDS = [*np.linspace(0, 2.8, 29), *HARD, *SAMPLED[:10]]
BOTH_WAYS, AT_EDGES = np.linspace(-1, 1, 13), [0.5, -0.5, 2.5, -2.5]  # exactly within, or without
SHEARS, MOVES = [*(BOTH_WAYS * 0.3), 0.001, 0.21], [*(BOTH_WAYS * 100), *AT_EDGES, 3.0, -250.0]
ARGUMENTS = {
    **{operation: [0] for operation in OPERATIONS},
    op.POSTERIZE: range(-4, 9),
    op.SOLARIZE: [0, 1, 2, 26, 100, 128, 200, 254, 255, 256],
    op.SOLARIZE_ADD: [0, 1, 33, 77, 99, 110, 127, 128],
    **dict.fromkeys((op.COLOR, op.CONTRAST, op.BRIGHTNESS, op.SHARPNESS), BLENDS),
    op.BLUR: [0.1, 0.3, 0.5, 0.77, 1.0, 1.31, 1.9, 2.0, 3.7, 5.0, 8.0],
    op.ROTATE: [*(BOTH_WAYS * 30), 0.0001, 0.05, 17.0, 45.0, 90.0, -90.0, 180.0, 200.0],
    op.SHEAR_X: SHEARS,
    op.SHEAR_Y: SHEARS,
    op.TRANSLATE_X: MOVES,
    op.TRANSLATE_Y: MOVES,
    op.TRANSLATE_X_REL: BOTH_WAYS * 0.45,
    op.TRANSLATE_Y_REL: BOTH_WAYS * 0.45,
}
SIZES = [(8, 8), (32, 32), (224, 224), (97, 131), (131, 97), (5, 22), (13, 14)]  # height, width
SIZES += [(1, 1), (1, 9), (2, 3), (3, 2), (3, 3), (4, 5), (12, 3)]
SIZES += [(3, 2011), (2011, 3)]  # over 2,000 pixels coordinates in fixed point would not fit
NAMES = {number: function.__name__ for number, function in OPERATIONS.items()}


def assert_pillows(size: tuple[int, int], operation: int, each: int = 1) -> None:
    """Of each so many of the arguments."""
    moves = operation >= op.ROTATE
    for image in images_of(*size)[: 3 if moves else None]:
        for argument, cubic in itertools.product([*ARGUMENTS[operation]][::each], (False, True)[: 1 + moves]):
            expected = by_timm(image, (operation, argument, cubic))
            assert np.array_equal(applied(image, operation, argument, cubic), expected), (argument, cubic)


@pytest.mark.parametrize("operation", OPERATIONS, ids=NAMES.get)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_pixels_are_pillows(size, operation):
    assert_pillows(size, operation, 4 if size == (224, 224) and operation in (op.COLOR, op.SHARPNESS) else 1)


def test_other_processors_and_no_compiler_give_the_same():
    """The code for machines without the C library, in affine, blend, filters and tables, run as Python."""
    program = """
from tests.data.augment.test_operations import assert_pillows, op
for operation in (op.EQUALIZE, op.COLOR, op.CONTRAST, op.BRIGHTNESS, op.SHARPNESS, *range(op.ROTATE, op.TRANSLATE_Y)):
    assert_pillows((7, 6), operation, 9)
"""
    environ = os.environ | {"WIDEMIX_NATIVE": "none", "NUMBA_DISABLE_JIT": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("factors", [SAMPLED, HARD, [1e30]], ids=["sampled", "hard", "huge"])
def test_tables_of_every_base_and_value_are_pillows_arithmetic(factors):
    """What rounding decides is not left to them."""
    made, certain = np.empty((3, 256), np.uint8), []
    base, value = np.mgrid[0:256, 0:256]
    up, down = np.maximum(value - base, 0), np.maximum(base - value, 0)
    for factor in np.float32(factors):
        certain.append(bool(blend_tables(factor, made)))
        if certain[-1]:
            exact = base.astype(np.float32) + factor * (value - base).astype(np.float32)
            found = base + made[0, up].astype(int) - made[1, down]
            assert np.array_equal(found.clip(0, 255), exact.clip(0, 255).astype(int)), factor
    if factors is HARD:
        assert not any(certain[: len(UNCERTAIN)])
        assert all(certain[-2:])
    if factors is SAMPLED:
        assert sum(certain) >= 0.9 * len(factors)
    assert not blend_tables(np.float32(-0.5), made)


@settings(max_examples=500)
@given(st.floats(-720, 720), st.integers(1, 500), st.integers(1, 500))
def test_the_matrix_of_a_rotation_is_pythons(degrees, height, width):
    angle = -math.radians(degrees % 360.0)
    cos, sin, back = round(math.cos(angle), 15), round(math.sin(angle), 15), round(-math.sin(angle), 15)
    x, y = width / 2, height / 2
    shift_x, shift_y = cos * -x + sin * -y + 0.0 + x, back * -x + cos * -y + 0.0 + y
    assert rotation(degrees, height, width) == (cos, sin, shift_x, back, cos, shift_y)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 7), (12, 3), (33, 47)])
def test_nothing_is_written_past_the_work_space(height, width):
    """Each array is followed by bytes that stay as they are; numba and C check no bounds."""
    image, spaces = images_of(height, width)[0], scratch_for(height, width)
    behind = [np.full(space.nbytes + 256, 165, np.uint8) for space in spaces]
    pairs = zip(behind, spaces, strict=True)
    scratch = Scratch(*(memory[: of.nbytes].view(of.dtype).reshape(of.shape) for memory, of in pairs))
    for operation, cubic in itertools.product(OPERATIONS, (False, True)):
        apply(image.copy(), operation, float([*ARGUMENTS[operation]][-1]), cubic, PACKED, scratch)
    rows, between = image.reshape(height, -1), scratch.mixed.reshape(height, -1)
    gaussian_smooth(rows, 2.0, scratch.taps, scratch.wide, between, scratch.weighted)
    for name, memory, space in zip(Scratch._fields, behind, spaces, strict=True):
        assert (memory[space.nbytes :] == 165).all(), name
