"""JPEGs made smaller plane by plane, against Pillow's Lanczos on the RGB image."""

import io

import numpy as np
import pytest
from PIL import Image, ImageFilter

from tests.data.test_decode import scene, without_scan, without_scans
from tests.data_prep.conftest import encode_bytes, saved
from widemix.data_prep.image import decode_file
from widemix.data_prep.jpeg import DamagedJpeg, plain_frame, segment_table, shrink_jpeg
from widemix.data_prep.settings import PrepSettings

pytestmark = pytest.mark.usefixtures("small_pages")

SAMPLINGS = {"4:4:4": 0x111111, "4:2:2": 0x211111, "4:2:0": 0x221111, "4:4:0": 0x121111, "4:1:1": 0x411111}


@pytest.fixture
def jpeg():
    """`jpeg(width, height, **options)`: a JPEG whose colours and edges move with the place, without noise."""

    def make(width, height, **options):
        y, x = np.mgrid[:height, :width] / (height, width)[0]
        discs = 128 + 100 * np.tanh(8 * np.sin(9 * x) * np.cos(7 * y))
        image = Image.fromarray(np.stack([discs, 255 * y / max(y.max(), 1), 255 - discs / 2], 2).astype(np.uint8))
        return saved(image.filter(ImageFilter.GaussianBlur(2)), **{"quality": 97, **options})

    return make


def shrink(data, **settings):
    return shrink_jpeg(data, plain_frame(data), PrepSettings(**{"quality": 100, **settings}))


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.int64)


def by_pillow(data, size):
    """Resized in RGB, and coded as ours are."""
    return pixels(saved(Image.open(io.BytesIO(data)).resize(size, Image.Resampling.LANCZOS), quality=100))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("size", [(400, 300), (333, 251), (301, 517), (900, 700)])
def test_pixels_are_about_those_of_pillow(jpeg, size, sampling):
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed: Pillow writes only three of these samplings")
    source = np.asarray(Image.open(io.BytesIO(jpeg(*size, subsampling=0))))[..., ::-1]
    options = [cv2.IMWRITE_JPEG_QUALITY, 97, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SAMPLINGS[sampling]]
    data = cv2.imencode(".jpg", source, options)[1].tobytes()
    assert plain_frame(data).sampling[0] == (SAMPLINGS[sampling] >> 20, SAMPLINGS[sampling] >> 16 & 15)
    body, _, rule = shrink(data, max_size=203)
    found = pixels(body)
    difference = np.abs(found - by_pillow(data, found.shape[1::-1]))
    assert difference.mean() < 0.8
    assert np.percentile(difference, 99.9) <= 6
    assert rule == ""


def plane(data: bytes, number: int, size: tuple[int, int]) -> np.ndarray:
    """Y, Cb or Cr as it is stored, where that is of this size, or as libjpeg's transform scales it to that."""
    image = Image.open(io.BytesIO(data))
    image.draft("YCbCr", size)
    found = np.asarray(image)[..., number]
    assert found.shape == size[::-1]
    return found


def assert_near(data: bytes, max_size: int, number: int, source: tuple[int, int]) -> None:
    """A plane of the shrunk JPEG is what Pillow makes of the source's plane of this size, rows first."""
    body = shrink(data, max_size=max_size)[0]
    width, height = Image.open(io.BytesIO(body)).size
    size = (width // 2, height // 2) if number else (width, height)
    expected = Image.fromarray(plane(data, number, source))
    for side in ((source[0], size[1]), size):
        expected = expected.resize(side, Image.Resampling.LANCZOS)
    difference = plane(body, number, size).astype(int) - np.asarray(expected)
    assert np.abs(difference).max() <= 2  # by rounding, and the quantisation of the result
    assert np.abs(difference).mean() < 0.3
    assert abs(difference.mean()) < 0.05


@pytest.mark.parametrize(
    ("size", "max_size", "scale"),
    [
        ((300, 200), 180, 1),
        ((333, 251), 270, 1),
        ((800, 600), 201, 1),
        ((800, 600), 200, 2),  # from four times the size on
        ((600, 800), 200, 2),
        ((800, 32), 200, 2),
        ((800, 28), 200, 1),  # of fewer than eight rows, or columns, never
        ((28, 800), 200, 1),
    ],
)
def test_luma_is_pillows(size, max_size, scale):
    """Scaled down by the transform where it is much larger."""
    data = saved(scene(3, *size), quality=95)
    assert_near(data, max_size, 0, (size[0] // scale, size[1] // scale))


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("subsampling", [0, 2])
def test_chroma_is_pillows(subsampling, number):
    data = saved(scene(3, 300, 200), quality=95, subsampling=subsampling)
    assert_near(data, 180, number, (150, 100) if subsampling else (300, 200))


@pytest.mark.parametrize("name", ["columns", "rows", "squares"])
def test_hard_edges_stay_black_and_white(name):
    y, x = np.mgrid[:300, :300] // 25 % 2
    dark = {"columns": x, "rows": y, "squares": x ^ y}[name]
    assert_near(
        saved(Image.fromarray(np.uint8(255) * dark.astype(np.uint8)).convert("RGB"), quality=95), 170, 0, (300, 300)
    )


@pytest.mark.parametrize("axis", [0, 1])
def test_chroma_of_an_odd_size_lies_where_its_luma_does(axis):
    """A sample of chroma is in the middle of two of luma, and the last one half beyond the image."""
    ramp = np.tile(30 + 0.4 * np.arange(500), (500, 1)).round().astype(np.uint8)
    flat, ramp = Image.new("L", (500, 500), 128), Image.fromarray(np.ascontiguousarray(ramp if axis else ramp.T))
    body = shrink(saved(Image.merge("YCbCr", (flat, ramp, flat)), quality=95, subsampling=0), max_size=25)[0]
    image = Image.open(io.BytesIO(body))
    assert image.size == (25, 25)
    image.draft("YCbCr", (12, 12))
    found = np.asarray(image)[..., 1].mean(axis=1 - axis)
    assert found.shape == (13,)
    assert np.abs(found - (30 + 0.4 * (40 * np.arange(13) + 19.5)))[:-1].max() < 2


def test_chroma_with_fewer_columns_than_the_result_is_interpolated():
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed: Pillow does not write this sampling")
    ramp = np.tile(60 + 1.06 * np.arange(128), (96, 1)).round().astype(np.uint8)
    flat = Image.new("L", (128, 96), 128)
    pixels = np.asarray(Image.merge("YCbCr", (flat, Image.fromarray(ramp), flat)).convert("RGB"))[..., ::-1]
    options = [cv2.IMWRITE_JPEG_QUALITY, 100, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SAMPLINGS["4:1:1"]]
    body = shrink(cv2.imencode(".jpg", pixels, options)[1].tobytes(), max_size=120)[0]
    found = plane(body, 1, (60, 45)).mean(axis=0)
    expected = 60 + 1.06 * ((np.arange(60) + 0.5) * 128 / 60 - 0.5)
    assert np.abs(found - expected)[4:-4].mean() < 0.5


def test_the_last_column_and_row_are_repeated():
    """As the JPEG shows where its header says that it is larger."""
    body, _, _ = shrink(saved(scene(3, 300, 200), quality=95), max_size=150, restart_markers=False)
    frame = body.index(b"\xff\xc0") + 5
    assert body[frame : frame + 4] == bytes([0, 100, 0, 150])
    larger = plane(body[:frame] + bytes([0, 104, 0, 152]) + body[frame + 4 :], 0, (152, 104)).astype(int)
    assert np.abs(larger[:100, 150:] - larger[:100, 149:150]).max() <= 4
    assert np.abs(larger[100:, :150] - larger[99:100, :150]).max() <= 4


@pytest.mark.parametrize("size", [(9, 300), (300, 9), (1000, 1), (1, 1000), (17, 16)])
def test_narrow_ones(jpeg, size):
    data = jpeg(*size)
    body, _, _ = shrink(data, max_size=16)
    found = pixels(body)
    assert max(found.shape[:2]) == 16
    assert np.abs(found - by_pillow(data, found.shape[1::-1])).mean() < 10


def test_one_colour_stays_that_colour():
    data = saved(Image.new("RGB", (555, 333), (200, 30, 90)), quality=100)
    for size in (554, 300, 100, 7):
        body, _, _ = shrink(data, max_size=size)
        assert np.array_equal(np.unique(pixels(body).reshape(-1, 3), axis=0), pixels(data)[0, :1])


def test_progressive_ones_come_out_the_same(jpeg):
    plain, progressive = (jpeg(300, 200, progressive=chosen) for chosen in (False, True))
    assert shrink(plain, max_size=90) == shrink(progressive, max_size=90)


@pytest.mark.parametrize("scans", range(1, 10))
def test_progressive_ones_that_lack_scans_are_pillows(jpeg, tmp_path, scans):
    """Stored smaller, as they are, and as predictions see them: all smooth their blocks, each version otherwise."""
    data = without_scans(jpeg(300, 200, progressive=True, quality=60), scans)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    stored = encode_bytes(tmp_path, data, max_size=90, restart_markers=False)
    smaller = saved(image.resize((90, 60), Image.Resampling.LANCZOS), quality=90)
    assert (stored.data, stored.rule) == (smaller, "")
    assert encode_bytes(tmp_path, data).parts[0] == data
    assert np.array_equal(decode_file(str(tmp_path / "a.jpg"), PrepSettings(raw=True)), np.asarray(image))


@pytest.mark.parametrize("scan", [6, 7, 8])
def test_progressive_ones_that_lack_one_scan_go_by_pillow(jpeg, scan):
    """That of the last bit of DC, of Cr, or of Cb, and the others are complete."""
    whole = jpeg(300, 200, progressive=True, quality=60)
    assert shrink(whole, max_size=90) is not None
    assert shrink(without_scan(whole, scan), max_size=90) is None


@pytest.mark.parametrize("quality", [77, 3])  # of which tables of a baseline JPEG take no more than 255
def test_quality_is_that_of_the_settings(jpeg, quality):
    body, _, _ = shrink(jpeg(300, 200), max_size=90, quality=quality)
    theirs = saved(Image.new("RGB", (8, 8)), quality=quality)
    assert Image.open(io.BytesIO(body)).quantization == Image.open(io.BytesIO(theirs)).quantization


def test_segments_are_those_of_the_markers(jpeg):
    body, table, _ = shrink(jpeg(500, 300), max_size=300)
    assert table == segment_table(body)
    assert np.frombuffer(table, "<u4")[0] > 0
    plain, none, _ = shrink(jpeg(500, 300), max_size=300, restart_markers=False)
    assert none == b""
    assert [b"\xff\xdd\0\4" in data for data in (body, plain)] == [True, False]  # the markers' interval


def test_others_go_by_pillow(jpeg, tmp_path, request):

    def assert_by_pillow(data):
        stored = encode_bytes(tmp_path, data, max_size=90, quality=100)
        assert np.array_equal(pixels(stored.data), by_pillow(data, (90, 60)))

    data = jpeg(300, 200, keep_rgb=True)
    assert shrink(data, max_size=90) is None
    assert_by_pillow(data)
    request.getfixturevalue("uncompiled")
    assert_by_pillow(jpeg(300, 200))


def test_damage_is_reported(jpeg):
    data = jpeg(300, 200)
    with pytest.raises(DamagedJpeg, match="remature end"):
        shrink(data[: len(data) // 2] + b"\xff\xd9", max_size=90)
    body, _, rule = shrink(data[:-2] + bytes(99) + data[-2:], max_size=90)
    assert "extraneous bytes before marker" in rule
    assert pixels(body).shape == (60, 90, 3)
