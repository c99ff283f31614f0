"""What is written for wide registers gives the same numbers on processors that have others, or none."""

import ctypes
import math
import platform

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from tests.data.test_decode import KINDS, PACKED, by_pillow, scene
from widemix import native
from widemix.data.augment.operations import rotation
from widemix.data_prep.jpeg import WRITTEN, pack, run_codec
from widemix.formats.beton import COEFFICIENTS, JPEG, RAW
from widemix.formats.checksums import crc32c
from widemix.native import build

HEIGHT, WIDTH = 67, 90
GREY = 0x7F7F7F
LEVELS = [
    pytest.param(of, marks=[pytest.mark.long] * (of == "v3")) for of in build.LEVELS.get(platform.machine(), {})
]


@pytest.fixture(scope="module", params=["plain", *LEVELS])
def library(request, tmp_path_factory) -> ctypes.CDLL:
    """Compiled for other processors, and for the least of its kind; other tests have this machine's."""
    compiler = build.find_compiler() or pytest.skip("there is no compiler")
    if request.param == "plain":
        path = tmp_path_factory.mktemp("plain") / "plain.so"
        build.compile_library([compiler], path, "-O0")
    elif request.param in build.runnable():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(build.VARIABLE, request.param)
            path = build.compiled()
    else:
        pytest.skip(f"this processor does not run code for {request.param}")
    return ctypes.CDLL(str(path))


def address(array: np.ndarray) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def call(function, *arguments) -> int:
    """Arrays by their addresses, whole numbers as int64, others as double."""
    kinds = {int: ctypes.c_int64, bool: ctypes.c_int64, float: ctypes.c_double, np.float32: ctypes.c_float}
    given = [address(a) if isinstance(a, np.ndarray) else kinds.get(type(a), lambda a: a)(a) for a in arguments]
    return function(*given)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


MATRICES = [
    (math.cos(0.3), math.sin(0.3), -9.0, -math.sin(0.3), math.cos(0.3), 12.0),
    rotation(-3.0, HEIGHT, WIDTH),
    (1.0, 0.2712, 0.0, 0.0, 1.0, 0.0),
    (1.0, 0.0, 0.0, -0.1234, 1.0, 2.5),
    (1.0, 0.0, 21.37, 0.0, 1.0, 0.0),
    (1.0, 0.0, 0.0, 0.0, 1.0, -4.5),
]


@pytest.mark.parametrize("cubic", [False, True])
@pytest.mark.parametrize("matrix", MATRICES)
def test_moved_as_pillow_does(library, cubic, matrix):
    image = noise(HEIGHT, WIDTH, 3)
    way, fill = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR, (127, 127, 127)
    whole = Image.fromarray(image)
    expected = whole.transform((WIDTH, HEIGHT), Image.Transform.AFFINE, matrix, way, fillcolor=fill)
    call(library.move_pixels, image, HEIGHT, WIDTH, *matrix, cubic, GREY)
    assert np.array_equal(image, np.asarray(expected))


def decoded(library, data: bytes, mode: int, size: tuple[int, int], box: list[int], cubic: bool, side=40) -> bytes:
    """A box of an image of this width and height."""
    image = np.full((side, side, 3), 7, np.uint8)
    box = np.array(box, np.int64)
    call(library.decode_from_memory, data, len(data), mode, *size[::-1], box, cubic, image, side, 0)
    return image.tobytes()


@pytest.mark.parametrize("cubic", [False, True])
@pytest.mark.parametrize(
    ("height", "width", "side"), [(61, 90, 24), (90, 33, 21), (20, 9, 31), (3, 200, 5), (64, 64, 1)]
)
def test_resized_as_pillow_does(library, height, width, side, cubic):
    image = noise(height, width, 3, seed=side)
    way = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
    expected = np.asarray(Image.fromarray(image).resize((side, side), way)).tobytes()
    assert decoded(library, image.tobytes(), RAW, (width, height), [0, 0, height, width, 0], cubic, side) == expected


@pytest.mark.parametrize("kind", [*PACKED, "pixels"])
def test_decoded_as_by_this_machines_code(library, kind, capfd):
    mine, numbers = native.load() or pytest.skip("there is no compiled code"), np.random.RandomState(0)
    for count, size in enumerate([(37, 53), (150, 100), (131, 70)]):
        image = scene(count, *size)
        data = image.tobytes() if kind == "pixels" else KINDS[kind](image)
        forms = [(data, RAW)] if kind == "pixels" else [(data, JPEG), (pack(data)[0], COEFFICIENTS)]
        for form, mode in forms * 4:
            box = [numbers.randint(0, size[1] // 2), numbers.randint(0, size[0] // 2)]
            box += [numbers.randint(1, size[1] - box[0] + 1), numbers.randint(1, size[0] - box[1] + 1)]
            given = form, mode, size, [*box, numbers.randint(2)], bool(numbers.randint(2))
            assert decoded(library, *given) == decoded(mine, *given), (size, mode, box)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("pixels", [1, 31, 32, 33, 63, 64, 65, 1000])
def test_values_are_looked_up_and_counted_by_channel(library, pixels):
    values, tables, counts = noise(pixels, 3), noise(3, 256, seed=1), np.full((3, 256), -1, np.int32)
    found, one = values.copy(), values.copy()
    assert call(library.look_up, found, values.size, tables)
    assert np.array_equal(found, tables[np.arange(3), values])
    done = call(library.look_up_one, one, values.size, tables[0].copy())  # where it is fast
    assert np.array_equal(one, tables[0][values] if done else values)
    assert call(library.count_values, values, values.size, counts)
    expected = [np.bincount(values[:, channel], minlength=256) for channel in range(3)]
    assert np.array_equal(counts, expected)


@pytest.mark.parametrize("factor", [-0.4, 0.0, 0.3, 1.0, 1.7, 2.9, 1e9])
@pytest.mark.parametrize(("height", "width"), [(3, 3), (5, 22), (HEIGHT, WIDTH)])
def test_blended_as_pillow_does(library, height, width, factor):
    image, factor, none = noise(height, width, 3, seed=width), np.float32(factor), ctypes.c_void_p(None)
    whole = Image.fromarray(image)
    library.sum_luma.restype = ctypes.c_int64
    if luma := call(library.sum_luma, image, image.size):  # where there are registers for it
        assert luma == np.asarray(whole.convert("L")).sum(dtype=int)
    ours, scratch = image.copy(), np.empty(18 * width + 448, np.uint8)
    if call(library.blend_with_luma, ours, ours.size, factor, none):
        assert np.array_equal(ours, ImageEnhance.Color(whole).enhance(factor))
    ours = image.copy()
    if call(library.sharpen, ours, height, 3 * width, factor, none, scratch):
        assert np.array_equal(ours, ImageEnhance.Sharpness(whole).enhance(factor))


def test_every_colour_is_that_of_libjpegs_arithmetic(library):
    """Of all pairs of Cb and Cr, in 16 bits after the point, rounded (jdcolor.c)."""
    cr, cb = (np.ascontiguousarray(each.reshape(-1).astype(np.uint8)) for each in np.mgrid[:256, :256])
    red, blue = cr.astype(int) - 128, cb.astype(int) - 128
    changes = [91881 * red, -22554 * blue - 46802 * red, 116130 * blue]
    for level in (0, 100, 255):
        y, found = np.full(len(cr) + 32, level, np.uint8), np.empty((len(cr) + 32, 4), np.uint8)
        library.colour_row(address(y), address(cb), address(cr), len(cr), address(found))
        for channel, change in enumerate(changes):
            expected = (level + ((change + 32768) >> 16)).clip(0, 255)
            assert np.array_equal(found[: len(cr), channel], expected)


def test_checksums_are_those_of_this_machines_code(library):
    data = noise(30_000).tobytes()
    library.crc32c.restype = ctypes.c_uint32
    for size in (0, 1, 7, 8, 9, 767, 768, 12_287, 12_288, 12_300, 29_999):
        assert library.crc32c(0, data[1:], ctypes.c_size_t(size)) == crc32c(data[1 : 1 + size])


WAVES = [np.tile(np.where(np.arange(64) // 4 % 2, 128 + h, 127 - h).astype(np.uint8), (64, 1)) for h in (5, 40, 127)]


@pytest.mark.parametrize("quality", [100, 90, 50])
def test_jpegs_are_restored_from_coefficients(library, quality):
    """Those of a scene, of square waves, whose coefficients of both signs have up to 10 bits, and of noise."""
    images = [noise(70, 90, 3), noise(70, 90, 3) // 128 * 255, *WAVES, np.asarray(scene(0, WIDTH, HEIGHT))]
    for image in images:
        data = by_pillow(Image.fromarray(image), quality=quality, subsampling=0)
        outcome, restored, size, message = run_codec(library.restore_jpeg, pack(data)[0], len(data))
        assert (outcome, restored[:size].tobytes()) == (WRITTEN, data), message
