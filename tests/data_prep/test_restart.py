"""Restart markers leave every pixel as it was, and each segment decodes by itself."""

import ctypes
import io
import random
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from tests.data.crafted_jpegs import CHROMA, LUMA, crafted
from tests.data.test_decode import filled, renumbered, scene, without_scans, without_table
from tests.data_prep.conftest import encode_bytes, saved
from widemix.data_prep import jpeg
from widemix.data_prep.jpeg import DamagedJpeg, plain_frame, with_markers
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
    assert jpeg.segment_table(saved(image(1, 100, 60))) == NO_SEGMENTS


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
    compiled = jpeg.library() or pytest.skip("there is no compiled code")
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
