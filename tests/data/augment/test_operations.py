"""Every operation is Pillow's as timm calls it, bit for bit, over its whole range and on images of many sizes."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter
from timm.data import auto_augment

from tests.data.augment.conftest import images_of
from widemix.data.augment import registry
from widemix.data.augment.affine import rotation, transform_plainly
from widemix.data.augment.blend import blend
from widemix.data.augment.operations import apply
from widemix.data.augment.scratch import Scratch, scratch_for
from widemix.data.augment.smooth import gaussian_smooth

FILL = (124, 116, 104)
PACKED = np.uint32(124 | 116 << 8 | 104 << 16)
LINEAR, CUBIC = Image.Resampling.BILINEAR, Image.Resampling.BICUBIC

PLAIN = {
    registry.AUTOCONTRAST: (auto_augment.auto_contrast, [None]),
    registry.EQUALIZE: (auto_augment.equalize, [None]),
    registry.INVERT: (auto_augment.invert, [None]),
    registry.POSTERIZE: (auto_augment.posterize, list(range(1, 9))),
    registry.SOLARIZE: (auto_augment.solarize, [0, 1, 2, 26, 100, 128, 200, 254, 255, 256]),
    registry.SOLARIZE_ADD: (auto_augment.solarize_add, [0, 1, 33, 77, 99, 110, 127, 128]),
    registry.COLOR: (auto_augment.color, np.linspace(0, 2.8, 29).tolist()),
    registry.CONTRAST: (auto_augment.contrast, np.linspace(0, 2.8, 29).tolist()),
    registry.BRIGHTNESS: (auto_augment.brightness, np.linspace(0, 2.8, 29).tolist()),
    registry.SHARPNESS: (auto_augment.sharpness, np.linspace(0, 2.8, 29).tolist()),
    registry.BLUR: (auto_augment.gaussian_blur, [0.1, 0.3, 0.77, 1.0, 1.31, 1.9, 2.0, 3.7, 8.0]),
}
BOTH_WAYS = np.linspace(-1, 1, 13)
MOVES = {
    registry.ROTATE: (auto_augment.rotate, [*(BOTH_WAYS * 30), 0.0001, 45.0, 90.0, -90.0, 180.0, 200.0]),
    registry.SHEAR_X: (auto_augment.shear_x, BOTH_WAYS * 0.3),
    registry.SHEAR_Y: (auto_augment.shear_y, BOTH_WAYS * 0.3),
    registry.TRANSLATE_X: (auto_augment.translate_x_abs, [*(BOTH_WAYS * 100), 3.0, -250.0]),
    registry.TRANSLATE_Y: (auto_augment.translate_y_abs, [*(BOTH_WAYS * 100), 3.0, -250.0]),
    registry.TRANSLATE_X_REL: (auto_augment.translate_x_rel, BOTH_WAYS * 0.45),
    registry.TRANSLATE_Y_REL: (auto_augment.translate_y_rel, BOTH_WAYS * 0.45),
}


def applied(image: np.ndarray, operation: int, argument: float | None, cubic: bool = False) -> np.ndarray:
    ours = image.copy()
    apply(ours, operation, float(argument or 0), cubic, PACKED, scratch_for(*image.shape[:2]))
    return ours


@pytest.mark.parametrize("operation", PLAIN, ids=lambda n: PLAIN[n][0].__name__)
def test_values_are_pillows(images, operation):
    function, arguments = PLAIN[operation]
    for image in images:
        for argument in arguments:
            given = () if argument is None else (argument,)
            expected = np.asarray(function(Image.fromarray(image), *given))
            assert np.array_equal(applied(image, operation, argument), expected), argument


@pytest.mark.parametrize("resample", [LINEAR, CUBIC], ids=lambda r: r.name)
@pytest.mark.parametrize("operation", MOVES, ids=lambda n: MOVES[n][0].__name__)
def test_moved_pixels_are_pillows(images, operation, resample):
    function, arguments = MOVES[operation]
    for image in images[:3]:
        for argument in map(float, arguments):
            expected = function(Image.fromarray(image), argument, fillcolor=FILL, resample=resample)
            ours = applied(image, operation, argument, resample == CUBIC)
            assert np.array_equal(ours, np.asarray(expected)), argument


@pytest.mark.one_in(2)
@pytest.mark.parametrize("resample", [LINEAR, CUBIC], ids=lambda r: r.name)
def test_without_a_compiler_too(resample):
    image = images_of(33, 47)[0]
    ways = {
        (auto_augment.rotate, 17.0): rotation(17.0, 33, 47),
        (auto_augment.shear_x, 0.21): (1.0, 0.21, 0.0, 0.0, 1.0, 0.0),
        (auto_augment.shear_y, -0.3): (1.0, 0.0, 0.0, -0.3, 1.0, 0.0),
        # Those at the edges are exactly within, or without.
        (auto_augment.translate_x_abs, 2.5): (1.0, 0.0, 2.5, 0.0, 1.0, 0.0),
        (auto_augment.translate_x_abs, -2.5): (1.0, 0.0, -2.5, 0.0, 1.0, 0.0),
        (auto_augment.translate_y_abs, 0.5): (1.0, 0.0, 0.0, 0.0, 1.0, 0.5),
        (auto_augment.translate_y_abs, -0.5): (1.0, 0.0, 0.0, 0.0, 1.0, -0.5),
    }
    for (move, argument), matrix in ways.items():
        expected = np.asarray(move(Image.fromarray(image), argument, fillcolor=FILL, resample=resample))
        ours = image.copy()
        transform_plainly(ours.reshape(33, -1), matrix, resample == CUBIC, PACKED, scratch_for(33, 47))
        assert np.array_equal(ours, expected), argument


@pytest.mark.parametrize("resample", [LINEAR, CUBIC], ids=lambda r: r.name)
@pytest.mark.parametrize("size", [(3, 2011), (2011, 3)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_moved_pixels_of_the_largest_images_are_pillows(size, resample):
    """Over 2,000 pixels coordinates in fixed point would not fit."""
    image = np.random.RandomState(0).randint(0, 256, (*size, 3)).astype(np.uint8)
    for operation, argument in ((registry.ROTATE, 0.05), (registry.SHEAR_Y, 0.001), (registry.SHEAR_X, 0.3)):
        function = MOVES[operation][0]
        expected = function(Image.fromarray(image), argument, fillcolor=FILL, resample=resample)
        assert np.array_equal(applied(image, operation, argument, resample == CUBIC), np.asarray(expected))


@settings(max_examples=500)
@given(st.floats(-720, 720), st.integers(1, 500), st.integers(1, 500))
def test_the_matrix_of_a_rotation_is_pythons(degrees, height, width):
    angle = -math.radians(degrees % 360.0)
    cos, sin, back = round(math.cos(angle), 15), round(math.sin(angle), 15), round(-math.sin(angle), 15)
    x, y = width / 2, height / 2
    shift_x, shift_y = cos * -x + sin * -y + 0.0 + x, back * -x + cos * -y + 0.0 + y
    assert rotation(degrees, height, width) == (cos, sin, shift_x, back, cos, shift_y)


@pytest.mark.parametrize("channel", range(3))
def test_one_channel_of_little_contrast_is_stretched(channel):
    image = np.random.RandomState(0).randint(0, 256, (16, 16, 3)).astype(np.uint8)
    image[0, 0], image[0, 1] = 0, 255
    image[:, :, channel] = 60 + image[:, :, channel] // 3
    expected = np.asarray(auto_augment.auto_contrast(Image.fromarray(image)))
    assert expected[:, :, channel].max() == 255
    assert np.array_equal(applied(image, registry.AUTOCONTRAST, None), expected)


def test_no_bits_left_is_black(images):
    """Pillow 13 raises there, and with it timm's policies at magnitude 10."""
    for bits in (0, -4):
        assert not applied(images[2], registry.POSTERIZE, bits).any()


@pytest.mark.parametrize("factor", [0.0, 0.3, 0.77, 1.0])
def test_blends_are_pillows(images, factor):
    for one, two in itertools.pairwise(images):
        expected = Image.blend(Image.fromarray(one), Image.fromarray(two), factor)
        ours = one.copy()
        blend(ours.reshape(-1), two.reshape(-1), factor)
        assert np.array_equal(ours, np.asarray(expected))


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 9), (2, 3), (3, 2), (3, 3), (4, 5), (12, 3)])
def test_the_smallest_images_too(height, width):
    image = np.random.RandomState(0).randint(0, 256, (height, width, 3)).astype(np.uint8)
    opened = Image.fromarray(image)
    assert np.array_equal(applied(image, registry.SHARPNESS, 1.7), auto_augment.sharpness(opened, 1.7))
    for sigma in (0.5, 2.0, 5.0):
        blurred = np.asarray(opened.filter(ImageFilter.GaussianBlur(sigma)))
        assert np.array_equal(applied(image, registry.BLUR, sigma), blurred), sigma
    assert np.array_equal(
        applied(image, registry.ROTATE, 20, cubic=True),
        np.asarray(auto_augment.rotate(opened, 20, fillcolor=FILL, resample=CUBIC)),
    )


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 7), (12, 3), (33, 47)])
def test_nothing_is_written_past_the_work_space(height, width):
    """Each array is followed by bytes that stay as they are; numba and C check no bounds."""
    image, spaces = images_of(height, width)[0], scratch_for(height, width)
    behind = [np.full(space.nbytes + 256, 165, np.uint8) for space in spaces]
    scratch = Scratch(
        *(
            memory[: space.nbytes].view(space.dtype).reshape(space.shape)
            for memory, space in zip(behind, spaces, strict=True)
        )
    )
    for operation, (_, arguments) in (PLAIN | MOVES).items():
        for cubic in (False, True):
            apply(image.copy(), operation, float(arguments[-1] or 0), cubic, PACKED, scratch)
    rows, between = image.reshape(height, -1), scratch.mixed.reshape(height, -1)
    gaussian_smooth(rows, 2.0, scratch.taps, scratch.wide, between, scratch.weighted)
    for name, memory, space in zip(Scratch._fields, behind, spaces, strict=True):
        assert (memory[space.nbytes :] == 165).all(), name
