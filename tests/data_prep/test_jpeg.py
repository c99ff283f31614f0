"""Restart markers leave each pixel as it was; JPEGs that are shrunk plane by plane are about those of Pillow."""

import ctypes
import io
import random
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image, ImageFilter

from tests.data.crafted_jpegs import CHROMA, LUMA, crafted
from tests.data.test_decode import filled, renumbered, scene, without_scan, without_scans, without_table
from tests.data_prep.conftest import encode_bytes, saved
from widemix.data_prep.image import decode_file
from widemix.data_prep.jpeg import DamagedJpeg, library, plain_frame, segment_table, shrink_jpeg, with_markers
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.formats.beton import NO_SEGMENTS, open_beton
from widemix.formats.manifest import read_manifest

pytestmark = pytest.mark.usefixtures("small_pages")

try:
    import cv2
except ImportError:  # comes with FFCV, which a set-up without root leaves out
    cv2 = None

NUMBER = np.dtype("<u4")


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)))


def transcoded(data):
    return with_markers(data, plain_frame(data))


def assert_same_pixels(before, after):
    assert np.array_equal(pixels(before), pixels(after))
    if cv2 is None:
        return
    first, second = (cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) for data in (before, after))
    assert np.array_equal(first, second)  # another build of libjpeg-turbo


def assert_segments_fit(data, table, size):
    """Each place follows a marker, numbered in turn, and they are as many as the image's MCUs ask for.

    An interval is the smallest part of a row that has 48 pixels.
    """
    interval, across, down, *places = np.frombuffer(table, NUMBER).tolist()
    assert plain_frame(data).scan == places[0]
    assert data[places[-1] : places[-1] + 2] == b"\xff\xd9"
    for number, place in enumerate(places[1:-1]):
        assert data[place - 2 : place] == bytes([0xFF, 0xD0 + number % 8])
    scan = data[places[0] : places[-1]]
    assert sum(scan.count(bytes([0xFF, 0xD0 + number])) for number in range(8)) == len(places) - 2
    row = -(-size[0] // across)
    assert interval == next(n for n in range(1, row + 1) if row % n == 0 and (n == row or n * across >= 48))
    assert (len(places) - 1) * interval == row * -(-size[1] // down)


@pytest.mark.parametrize("size", [(40, 30), (1, 1), (500, 31), (333, 100), (352, 17)])
@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": 0},
        {"subsampling": 1},
        {"subsampling": 2},
        {"quality": 100},
        {"quality": 3},
        {"keep_rgb": True},
        {"restart_marker_blocks": 7},
        {"optimize": True},
    ],
)
def test_pixels_stay(image, size, options):
    before = saved(image(1, *size), **options)
    after, table, rule = transcoded(before)
    assert_same_pixels(before, after)
    assert_segments_fit(after, table, size)
    assert rule == ""


def test_a_jpeg_whose_intervals_have_no_markers_has_no_table(image):
    """As Pillow writes it where it does not know of them."""
    assert segment_table(saved(image(1, 100, 60))) == NO_SEGMENTS


@pytest.mark.parametrize(
    "options", [{"subsampling": k} for k in range(3)] + [{"quality": 100}, {"quality": 20}], ids=str
)
def test_bytes_are_those_of_pillow_with_optimised_tables(options):
    """Whose tables are libjpeg's for these very symbols, too."""
    for size in ((320, 240), (100, 70), (17, 33)):
        plain = saved(scene(1, *size), **options)
        interval = int(np.frombuffer(transcoded(plain)[1], NUMBER)[0])
        expected = saved(scene(1, *size), optimize=True, restart_marker_blocks=interval, **options)
        assert transcoded(plain)[0] == transcoded(expected)[0] == expected


@pytest.mark.parametrize("count", [16, 17, 18, 24])
def test_no_code_has_more_than_16_bits(count):
    """Though frequencies as Fibonacci's numbers ask for `count`; none is of ones alone (T.81, annex K.2)."""
    compiled = library() or pytest.skip("there is no compiled code")
    frequency = np.zeros(256, np.uint32)
    frequency[:2] = 1, 2
    for symbol in range(2, count):
        frequency[symbol] = frequency[symbol - 2 : symbol].sum()
    table = np.zeros(17 + 256 + 16, np.uint8)  # of libjpeg: codes of each length, symbols, and a flag
    compiled.make_optimal_table(ctypes.c_void_p(frequency.ctypes.data), ctypes.c_void_p(table.ctypes.data))
    counts, symbols = table[:17].astype(int), table[17 : 17 + count].tolist()
    assert sorted(symbols) == list(range(count))
    assert counts.sum() == count
    assert counts[1] == 1
    assert counts[15:].any()
    assert (counts * 2 ** np.arange(16, -1, -1)).sum() < 2**16


ODD = [(2, 2), (1, 1), (1, 1)]


def test_pixels_of_jpegs_that_encoders_seldom_write_stay():
    """Tables of any numbers or left out, as in Motion JPEG; extended frames, fill bytes, a byte more, three scans."""
    plain, marked = saved(scene(2, 90, 70)), saved(scene(2, 90, 70), restart_marker_blocks=3)
    jpegs = [renumbered(saved(scene(k, 90, 70), subsampling=k)) for k in range(3)]
    jpegs += [plain.replace(b"\xff\xc0", b"\xff\xc1"), filled(marked, 1), plain[:-2] + b"\x2a" + plain[-2:]]
    jpegs += [crafted((90, 70), *ODD, dc=CHROMA), crafted((90, 70), *ODD, apart=True)]
    jpegs += [crafted((90, 70), *ODD, first=first) for first in (-1023, 1023)]
    jpegs += [without_table(plain, table) for table in range(4)]
    for data in jpegs:
        after, table, rule = transcoded(data)
        assert_same_pixels(data, after)
        assert_segments_fit(after, table, (90, 70))
        assert rule == ""


WRONG = (good := crafted((50, 41), *ODD)).index(b"\xff\xda") + 6
MARKED = saved(scene(2, 64, 96), quality=90, restart_marker_rows=1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (crafted((50, 41), *ODD, first=1024), "DCT coefficient out of range"),
        # a DC of 16 bits, and a code of ones alone
        (crafted((50, 41), *ODD, dc=((*LUMA[0], 1), (*range(12), 16))), "Bogus Huffman table"),
        (crafted((50, 41), *ODD, dc=((*LUMA[0][:-1], 2), (*range(12), 12))), "Bogus Huffman table"),
        *((good[:WRONG] + bytes([number]) + good[WRONG + 1 :], "table 0x05 was not defined") for number in (0x50, 5)),
        *((MARKED[: -2 - count] + MARKED[-2:], "premature end") for count in (1, 2, 3, 5)),
        (MARKED[: len(MARKED) // 2] + b"\xff\xd9", "premature end"),
    ],
)
def test_what_libjpeg_does_not_take_is_damage(data, words):
    with pytest.raises(DamagedJpeg, match=words):
        transcoded(data)


@pytest.mark.parametrize("number", [0xD3, 0xD1])
@pytest.mark.parametrize("more", [b"", b"more" * 9])  # of which libjpeg warns later
def test_markers_out_of_turn_are_told(number, more):
    changed = MARKED.replace(b"\xff\xd2", bytes([0xFF, number]))
    words = f"repaired: Corrupt JPEG data: found marker {number:#x} instead of RST2"
    assert transcoded(changed[:-2] + more + changed[-2:])[2] == words


def test_one_that_grows_by_more_than_a_quarter_is_kept(image, limits):
    """And by 64 KiB more, so that a small one is never kept for that."""
    data = saved(image(5))
    grown, table, rule = transcoded(data)
    assert (len(grown) < len(data), rule) == (True, "")
    for room, expected in (
        (100, (data, NO_SEGMENTS, "kept as it is: grows by a quarter")),
        (65_536, (grown, table, "")),
    ):
        limits({"widemix.data_prep.jpeg.MAX_GROWTH": room - len(data) * 5 // 4})
        assert transcoded(data) == expected


def test_one_with_a_warning_that_lacks_scans_is_pillows(tmp_path, image):
    """What libjpeg would write of it is not smoothed, as decoders smooth it."""
    cut = without_scans(saved(image(5), progressive=True), 4)
    data = cut[:-2] + b"\0\0\0\0" + cut[-2:]  # extraneous bytes before the marker
    assert with_markers(data, plain_frame(data)) is None
    assert with_markers(cut, plain_frame(cut)) == (cut, NO_SEGMENTS, "kept as it is: progressive")
    stored = encode_bytes(tmp_path, data, restart_markers=True)
    expected = saved(Image.open(io.BytesIO(data)), quality=90, optimize=False)
    assert np.array_equal(pixels(stored.data), pixels(expected))


@pytest.mark.parametrize("options", [{"subsampling": 0}, {"subsampling": 2, "restart_marker_blocks": 5}], ids=str)
def test_what_is_damaged_is_found_as_jpegtran_finds_it(image, options):
    if shutil.which("jpegtran") is None:
        pytest.skip("needs jpegtran (Debian's libjpeg-turbo-progs)")
    whole, numbers, found = saved(image(7, 120, 90), quality=90, **options), random.Random(1), set()
    for _ in range(40):
        data = bytearray(whole)
        at = numbers.randrange(plain_frame(whole).scan, len(data) - 2)
        data[at : at + numbers.randrange(3)] = numbers.choice([b"", b"\xff", b"\xff\xd1", numbers.randbytes(1)])
        jpegtran = subprocess.run(["jpegtran", "-copy", "none", "-optimize"], input=data, capture_output=True)
        try:
            after, _, rule = transcoded(bytes(data))
        except DamagedJpeg as damage:
            rule = f"left out: {damage}"
        assert rule.partition(": ")[2] in jpegtran.stderr.decode()
        assert rule if jpegtran.stderr else np.array_equal(pixels(jpegtran.stdout), pixels(after))
        found.add(rule.partition(":")[0])
    assert found == {"", "repaired", "left out"}


def test_re_encoded_images_have_markers_and_unchanged_pixels(tmp_path, image):
    data = saved(image(6, 700, 300), "PNG")
    marked, plain = (encode_bytes(tmp_path, data, "a.png", restart_markers=chosen) for chosen in (True, False))
    assert plain.segments == b""
    assert_same_pixels(plain.data, marked.data)
    assert_segments_fit(marked.data, marked.segments, (marked.width, marked.height))


def test_without_a_compiler_originals_are_kept(tmp_path, folder, image, uncompiled, capsys):
    image(0).save(folder / "train/ant/rewritten.png")
    prepare("image-folder", folder, tmp_path / "out", PrepSettings(shuffle=False), processes=1)
    note = "note: JPEGs, if there are any, are stored as they are, without restart markers, some damaged ones too: "
    assert capsys.readouterr().err.count(f"{note}WIDEMIX_NATIVE=none\n") == 1
    assert read_manifest(tmp_path / "out").versions["jpeg"] == "none"
    beton, names = open_beton(tmp_path / "out/train.beton"), sorted((folder / "train").glob("*/*"))
    for i, name in enumerate(names):
        data = beton.bytes[beton.offset[i] :][: beton.size[i]].tobytes()
        assert (data == name.read_bytes()) is (name.suffix == ".JPEG")
        assert beton.bytes[beton.segments[i] :][: beton.segments_size[i]].any() == (name.suffix != ".JPEG")


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


def values(data):
    """As RGB, of which differences have a sign."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.int64)


def by_pillow(data, size):
    """Resized in RGB, and coded as ours are."""
    return values(saved(Image.open(io.BytesIO(data)).resize(size, Image.Resampling.LANCZOS), quality=100))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("size", [(400, 300), (333, 251), (301, 517), (900, 700)])
def test_pixels_are_about_those_of_pillow(jpeg, size, sampling):
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed: Pillow writes only three of these samplings")
    source = np.asarray(Image.open(io.BytesIO(jpeg(*size, subsampling=0))))[..., ::-1]
    options = [cv2.IMWRITE_JPEG_QUALITY, 97, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SAMPLINGS[sampling]]
    data = cv2.imencode(".jpg", source, options)[1].tobytes()
    assert plain_frame(data).sampling[0] == (SAMPLINGS[sampling] >> 20, SAMPLINGS[sampling] >> 16 & 15)
    body, _, rule = shrink(data, max_size=203)
    found = values(body)
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
    found = values(body)
    assert max(found.shape[:2]) == 16
    assert np.abs(found - by_pillow(data, found.shape[1::-1])).mean() < 10


def test_one_colour_stays_that_colour():
    data = saved(Image.new("RGB", (555, 333), (200, 30, 90)), quality=100)
    for size in (554, 300, 100, 7):
        body, _, _ = shrink(data, max_size=size)
        assert np.array_equal(np.unique(values(body).reshape(-1, 3), axis=0), values(data)[0, :1])


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
        assert np.array_equal(values(stored.data), by_pillow(data, (90, 60)))

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
    assert values(body).shape == (60, 90, 3)
