"""What is written for wide registers gives the same numbers on processors that have others."""

import ctypes
import math
import platform

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from tests.data.test_decode import by_pillow, scene
from widemix.data.decode import MESSAGE
from widemix.data_prep.coefficients import pack
from widemix.data_prep.restart import run_codec
from widemix.native import build, levels

HEIGHT, WIDTH = 67, 90
GREY = 0x7F7F7F
PLATFORM = levels.LEVELS.get(platform.machine(), {})
LEVELS = [pytest.param(level, marks=pytest.mark.long) if level == "v3" else level for level in PLATFORM]


@pytest.fixture(scope="module", params=LEVELS)
def library(request) -> ctypes.CDLL:
    """Compiled for other processors; other tests have this machine's."""
    if request.param not in levels.runnable():
        pytest.skip(f"this processor does not run code for {request.param}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(levels.VARIABLE, request.param)
        library = ctypes.CDLL(str(build.compiled()))
    reals, whole = ctypes.c_double, ctypes.c_int64
    library.move_pixels.argtypes = [ctypes.c_void_p, whole, whole, *[reals] * 6, whole, whole]
    for function in (library.look_up, library.look_up_one):
        function.argtypes = [ctypes.c_void_p, whole, ctypes.c_void_p]
    library.sum_luma.argtypes, library.sum_luma.restype = [ctypes.c_void_p, whole], whole
    library.blend_with_luma.argtypes = [ctypes.c_void_p, whole, ctypes.c_float, ctypes.c_void_p]
    library.sharpen.argtypes = [ctypes.c_void_p, whole, whole, ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p]
    library.read_images.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 17, *[whole] * 4]
    return library


@pytest.mark.parametrize("cubic", [False, True])
@pytest.mark.parametrize(
    "matrix",
    [
        (math.cos(0.3), math.sin(0.3), -9.0, -math.sin(0.3), math.cos(0.3), 12.0),
        (1.0, 0.2712, 0.0, 0.0, 1.0, 0.0),
        (1.0, 0.0, 0.0, -0.1234, 1.0, 0.0),
        (1.0, 0.0, 21.37, 0.0, 1.0, 0.0),
    ],
)
def test_moved_as_pillow_does(library, cubic, matrix):
    image = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    way = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
    whole = Image.fromarray(image)
    expected = whole.transform((WIDTH, HEIGHT), Image.Transform.AFFINE, matrix, way, fillcolor=(127, 127, 127))
    library.move_pixels(image.ctypes.data, HEIGHT, WIDTH, *matrix, cubic, GREY)
    assert np.array_equal(image, np.asarray(expected))


@pytest.mark.parametrize("cubic", [False, True])
@pytest.mark.parametrize(
    ("height", "width", "side"), [(61, 90, 24), (90, 33, 21), (20, 9, 31), (3, 200, 5), (64, 64, 1)]
)
def test_resized_as_pillow_does(library, tmp_path, height, width, side, cubic):
    image = np.random.default_rng(side).integers(0, 256, (height, width, 3), np.uint8)
    (tmp_path / "raw").write_bytes(image.tobytes())
    made, messages = np.empty((1, side, side, 3), np.uint8), np.zeros(1, f"S{MESSAGE}")
    sizes = [np.array([size], np.int64) for size in (height, width, 0, image.size, 0, 0, 0)]  # up to which sample
    tables = [np.ones(1, np.uint8), *sizes[:-1], np.zeros(1, np.int64)]  # the last: labels
    places, sides = np.array([made.ctypes.data], np.uintp), np.array([side])
    request = [sizes[-1], np.array([0, 0, height, width, 0]), np.array([cubic], np.uint8), places, sides, messages]
    with open(tmp_path / "raw", "rb") as file:
        addresses = [array.ctypes.data for array in tables] + [None] * 3 + [array.ctypes.data for array in request]
        library.read_images(file.fileno(), *addresses, 1, 1, 0, 1)
    assert messages[0] == b""
    way = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
    assert np.array_equal(made[0], np.asarray(Image.fromarray(image).resize((side, side), way)))


@pytest.mark.parametrize("pixels", [1, 63, 64, 65, 1000])
def test_each_value_is_looked_up_in_its_channels_table(library, pixels):
    rng = np.random.default_rng(pixels)
    values, tables = rng.integers(0, 256, (pixels, 3), np.uint8), rng.integers(0, 256, (3, 256), np.uint8)
    expected = tables[np.arange(3), values]
    library.look_up(values.ctypes.data, values.size, tables.ctypes.data)
    assert np.array_equal(values, expected)


@pytest.mark.parametrize("pixels", [1, 31, 32, 1000])
def test_each_value_is_looked_up_in_one_table(library, pixels):
    rng = np.random.default_rng(pixels)
    values, table = rng.integers(0, 256, pixels, np.uint8), rng.integers(0, 256, 256, np.uint8)
    expected = table[values]
    if library.look_up_one(values.ctypes.data, values.size, table.ctypes.data):  # where it is fast
        assert np.array_equal(values, expected)


@pytest.mark.parametrize("factor", [-0.4, 0.0, 0.3, 1.0, 1.7, 2.9, 1e9])
@pytest.mark.parametrize(("height", "width"), [(3, 3), (5, 22), (HEIGHT, WIDTH)])
def test_blended_as_pillow_does(library, height, width, factor):
    image = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    whole = Image.fromarray(image)
    assert library.sum_luma(image.ctypes.data, image.size) == np.asarray(whole.convert("L")).sum(dtype=int)
    ours, scratch = image.copy(), np.empty(18 * width + 448, np.uint8)
    assert library.blend_with_luma(ours.ctypes.data, ours.size, factor, None)
    assert np.array_equal(ours, ImageEnhance.Color(whole).enhance(factor))
    ours = image.copy()
    assert library.sharpen(ours.ctypes.data, height, 3 * width, factor, None, scratch.ctypes.data)
    assert np.array_equal(ours, ImageEnhance.Sharpness(whole).enhance(factor))


def test_jpegs_are_restored_from_coefficients(library):
    """Those of a scene, and of square waves, whose coefficients of both signs have up to 10 bits."""
    waves = [np.where(np.arange(64) // 4 % 2, 128 + height, 127 - height) for height in (5, 40, 127)]
    squares = [Image.fromarray(np.tile(wave.astype(np.uint8), (64, 1))) for wave in waves]
    for image in (scene(0, WIDTH, HEIGHT), *squares):
        data = by_pillow(image, quality=100)
        _, restored, size, message = run_codec(library.restore_jpeg, pack(data)[0], len(data))
        assert restored[:size].tobytes() == data, message
