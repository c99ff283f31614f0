"""Images of very many pixels or very long sides, against Pillow's own reading of them."""

import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from widemix.data_prep.image import decode_file, encode
from widemix.data_prep.opening import decoded_pixels
from widemix.data_prep.samples import FileSlice, Sample
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError
from widemix.formats.beton import JPEG

pytestmark = pytest.mark.usefixtures("small_pages")

LONG = [{"max_size": 0}, {"max_size": 64, "side": "shortest"}, {"max_size": 0, "raw": True}]


@pytest.fixture
def stored(tmp_path, image):
    """`stored(name, width, height, **options)`: the path of an image file, in the format of its name."""

    def make(name, width, height, mode="RGB", **options):
        small = image(width, 160, 80, mode=mode)
        small.resize((width, height), Image.Resampling.BICUBIC).save(tmp_path / name, **options)
        return tmp_path / name

    return make


def encode_file(path, **settings):
    return encode(Sample(path.name, 0, FileSlice(str(path))), PrepSettings(**settings))


@pytest.mark.parametrize("settings", LONG)
def test_a_side_that_no_file_can_hold_is_left_out(stored, settings):
    path = stored("a.png", 70_000, 3)
    words = "is 70000 x 3 pixels, and a side has at most 655[03][05]; shrink images with a max_size"
    assert encode_file(path, **settings).data == b""
    with pytest.raises(InputError, match=rf"a\.png: {words}"):
        encode_file(path, on_corrupt="error", **settings)
    assert encode_file(stored("b.png", 3, 70_000), **settings).rule.startswith("left out: is 3 x 70000 pixels")
    shrunk = encode_file(path, raw=True)
    with Image.open(path) as image:
        assert shrunk.data == image.resize((512, 1), Image.Resampling.LANCZOS).tobytes()


def test_the_longest_sides(stored):
    path = stored("a.png", 65_535, 1)
    assert encode_file(path, raw=True, max_size=0).data == Image.open(path).tobytes()
    assert encode_file(path, max_size=65_535).rule.startswith(
        "left out: is 65535 x 1 pixels, and a side has at most 65500"
    )
    assert encode_file(stored("b.png", 65_500, 1), max_size=0).width == 65_500


@pytest.mark.parametrize("mode", ["L", "CMYK"])
@pytest.mark.parametrize(("width", "scaled"), [(100, (202, 101)), (150, (403, 202))], ids=["an eighth", "a quarter"])
def test_a_large_jpeg_is_scaled_down_while_it_is_decoded(stored, mode, width, scaled):
    path, size, most = stored("a.jpg", 1610, 805, mode=mode), (width, width // 2), scaled[0] * scaled[1]
    found = encode_file(path, raw=True, max_size=width, max_pixels=most)
    with Image.open(path) as image:
        image.draft(None, (2 * size[0], 2 * size[1]))
        assert image.size == scaled
        expected = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
        whole = Image.open(path).convert("RGB").resize(size, Image.Resampling.LANCZOS)
    pixels = np.frombuffer(found.data, np.uint8).reshape(*size[::-1], 3)
    assert np.array_equal(pixels, expected)
    assert np.abs(pixels - np.asarray(whole, int)).mean() < 1
    assert encode_file(path, raw=True, max_size=width).data == whole.tobytes()
    assert encode_file(path, raw=True, max_size=width, max_pixels=most - 1).data == b""


def test_so_are_others_that_need_their_pixels(stored, image):
    """One of several pictures; one that is turned; and one that is shrunk plane by plane, both by an eighth."""
    path, few = stored("a.jpg", 1610, 805), {"max_size": 100, "max_pixels": 202 * 101}
    Image.open(path).save(path.with_name("b.jpg"), "MPO", save_all=True, append_images=[image(0)])
    found = encode_file(path.with_name("b.jpg"), **few)
    assert (found.width, found.height, found.rule) == (100, 50, "first of 2 frames")
    small = encode_file(path, **few)
    assert small.mode == JPEG
    assert small.data == encode_file(path, max_size=100).data
    with Image.open(path) as opened:
        whole = np.asarray(opened.resize((100, 50), Image.Resampling.LANCZOS), int)
    assert np.abs(np.asarray(Image.open(io.BytesIO(small.data))) - whole).mean() < 3
    exif = Image.Exif()
    exif[0x0112] = 6
    path = stored("c.jpg", 1605, 801, exif=exif)
    for most in (10**8, 10**5):
        turned = encode_file(path, raw=True, max_size=100, max_pixels=most)
        assert (turned.width, turned.height, turned.rule) == (50, 100, "turned upright")


@pytest.mark.parametrize(("name", "options"), [("a.jpg", {"progressive": True}), ("a.png", {}), ("a.webp", {})])
def test_what_is_held_whole_counts_whole(stored, name, options):
    path = stored(name, 1600, 800, **options)
    words = "left out: has 1,280,000 pixels, more than max_pixels 1,279,999, which can be set higher"
    assert encode_file(path, max_size=100, max_pixels=1_279_999).rule == words
    assert encode_file(path, max_size=100, max_pixels=1_280_000).width == 100


def test_a_jpeg_that_is_kept_is_not_decoded(stored):
    path = stored("a.jpg", 1600, 800)
    settings = {"max_size": 0, "restart_markers": False, "max_pixels": 1}
    assert encode_file(path, **settings).data == path.read_bytes()


@pytest.mark.parametrize("name", ["a.jpg", "grey.jpg", "a.png", "a.webp", "a.gif", "a.tif", "a.avif"])
def test_pillows_limit_of_the_process_neither_counts_nor_changes(stored, name, system):
    mode = {"grey.jpg": "L", "a.gif": "P"}.get(name, "RGB")
    path = stored(name, 160, 80, mode=mode, **({"save_all": True} if name == "a.gif" else {}))
    before = encode_file(path)
    system({"PIL.Image.MAX_IMAGE_PIXELS": 1000})
    with pytest.raises(Image.DecompressionBombError):
        Image.open(path)
    assert encode_file(path) == before
    with ThreadPoolExecutor(8) as threads:
        pixels = list(threads.map(decode_file, [str(path)] * 40, [PrepSettings(raw=True)] * 40))
    assert all(np.array_equal(found, pixels[0]) for found in pixels)
    assert Image.MAX_IMAGE_PIXELS == 1000
    path.with_name("no image").touch()
    assert encode_file(path.with_name("no image")).rule == "left out: is empty"
    assert Image.MAX_IMAGE_PIXELS == 1000
    system({"PIL.Image.MAX_IMAGE_PIXELS": None})
    assert np.array_equal(decode_file(str(path), PrepSettings(raw=True)), pixels[0])


def test_how_much_of_a_jpeg_is_held():
    assert decoded_pixels((20_000, 10_000), (512, 256), progressive=False) == 2500 * 1250
    assert decoded_pixels((20_000, 10_000), (512, 256), progressive=True) == 20_000 * 10_000
    assert decoded_pixels((2047, 1024), (512, 256), progressive=False) == 2047 * 1024
    assert decoded_pixels((2048, 1025), (512, 256), progressive=False) == 1024 * 513
