"""What is written for wide registers gives the same numbers on processors that have narrower ones."""

import ctypes
import math
import platform

import numpy as np
import pytest
from PIL import Image

from pipeline.data.decode import MESSAGE
from pipeline.native import build

HEIGHT, WIDTH = 67, 90
GREY = 0x7F7F7F


PROCESSORS = {"x86_64": ["x86-64-v2", "x86-64-v3"], "aarch64": ["armv8-a"]}  # registers of 16, 32; 16 bytes


@pytest.fixture(scope="module", params=PROCESSORS.get(platform.machine(), []))
def library(request, tmp_path_factory) -> ctypes.CDLL:
    """Compiled for processors with narrow registers; other tests have this machine's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(build, "_NATIVE", {platform.machine(): f"-march={request.param}"})
        library = ctypes.CDLL(str(build.compiled()))
    reals, whole = ctypes.c_double, ctypes.c_int64
    library.move_pixels.argtypes = [ctypes.c_void_p, whole, whole, *[reals] * 6, whole, whole]
    library.look_up.argtypes = [ctypes.c_void_p, whole, ctypes.c_void_p]
    library.read_pictures.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 17, *[whole] * 4]
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
    picture = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    way = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
    whole = Image.fromarray(picture)
    expected = whole.transform((WIDTH, HEIGHT), Image.Transform.AFFINE, matrix, way, fillcolor=(127, 127, 127))
    library.move_pixels(picture.ctypes.data, HEIGHT, WIDTH, *matrix, cubic, GREY)
    assert np.array_equal(picture, np.asarray(expected))


@pytest.mark.parametrize("cubic", [False, True])
@pytest.mark.parametrize(("height", "width", "side"), [(61, 90, 24), (90, 33, 21), (20, 9, 31), (3, 200, 5), (64, 64, 1)])
def test_resized_as_pillow_does(library, tmp_path, height, width, side, cubic):
    picture = np.random.default_rng(side).integers(0, 256, (height, width, 3), np.uint8)
    (tmp_path / "raw").write_bytes(picture.tobytes())
    made, messages = np.empty((1, side, side, 3), np.uint8), np.zeros(1, f"S{MESSAGE}")
    sizes = [np.array([size], np.int64) for size in (height, width, 0, picture.size, 0, 0, 0)]  # up to which sample
    tables = [np.ones(1, np.uint8), *sizes[:-1], np.zeros(1, np.int64)]  # the last: labels
    places, sides = np.array([made.ctypes.data], np.uintp), np.array([side])
    request = [sizes[-1], np.array([0, 0, height, width, 0]), np.array([cubic], np.uint8), places, sides, messages]
    with open(tmp_path / "raw", "rb") as file:
        addresses = [array.ctypes.data for array in tables] + [None] * 3 + [array.ctypes.data for array in request]
        library.read_pictures(file.fileno(), *addresses, 1, 1, 0, 1)
    assert messages[0] == b""
    way = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
    assert np.array_equal(made[0], np.asarray(Image.fromarray(picture).resize((side, side), way)))


@pytest.mark.parametrize("pixels", [1, 63, 64, 65, 1000])
def test_each_value_is_looked_up_in_its_channels_table(library, pixels):
    rng = np.random.default_rng(pixels)
    values, tables = rng.integers(0, 256, (pixels, 3), np.uint8), rng.integers(0, 256, (3, 256), np.uint8)
    expected = tables[np.arange(3), values]
    library.look_up(values.ctypes.data, values.size, tables.ctypes.data)
    assert np.array_equal(values, expected)
