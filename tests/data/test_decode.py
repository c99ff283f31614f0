"""Decoding: Pillow's pixels for every kind of JPEG and box, by the C library and without it; damage is reported."""

import base64
import ctypes
import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from tests.data.crafted_jpegs import CHROMA, LUMA, OTHERS, crafted
from tests.data.plain_batches import resized_box
from tests.data_prep.conftest import saved as by_pillow
from widemix import native
from widemix.data.decode import Decoder, centre_boxes, cubic, random_boxes, read_with_pillow
from widemix.data_prep.beton_writer import BetonWriter
from widemix.data_prep.jpeg import DamagedJpeg, pack, plain_frame, unpack, with_markers
from widemix.data_prep.records import IMAGES, SEGMENTED_IMAGES, Encoded, image_layout
from widemix.errors import InputError
from widemix.formats.beton import COEFFICIENT_FIELDS, COEFFICIENTS, JPEG, RAW, open_beton

REAL = Path(__file__).parents[3] / "shared/data/imagenet-sample"
ODD = [[(1, 1), (2, 1)], [(1, 1), (1, 2)], [(2, 1), (1, 1)], [(1, 2), (1, 1)]]  # of chroma
SIZES = [(1, 1), (7, 5), (16, 16), (17, 33), (150, 100), (101, 153), (260, 67), (333, 250)]


def scene(seed: int, width: int, height: int) -> Image.Image:
    """Soft colours, hard edges and some noise, as photographs have."""
    numbers = np.random.RandomState(seed)
    soft = Image.fromarray(numbers.randint(0, 256, (4, 5, 3)).astype(np.uint8)).resize((width, height), 3)
    pixels = np.asarray(soft).astype(int)
    for _ in range(6):
        y, x = numbers.randint(0, height), numbers.randint(0, width)
        pixels[y : y + numbers.randint(1, 60), x : x + numbers.randint(1, 60)] += numbers.randint(-90, 90, 3)
    return Image.fromarray((pixels + numbers.randint(-9, 10, pixels.shape)).clip(0, 255).astype(np.uint8))


def by_opencv(image: Image.Image, sampling: str) -> bytes:
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed")
    factor = getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{sampling}")
    options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factor, cv2.IMWRITE_JPEG_QUALITY, 90]
    return cv2.imencode(".jpg", np.asarray(image)[:, :, ::-1], options)[1].tobytes()


def overflowing(jpeg: bytes) -> bytes:
    """With 255 in place of its multipliers, so that the inverse transform overflows 16 bits. libjpeg takes it."""
    parts = jpeg.split(b"\xff\xdb")
    assert len(parts) > 1
    return b"\xff\xdb".join([parts[0], *(part[:3] + b"\xff" * 64 + part[67:] for part in parts[1:])])


def of_unknown_colours(jpeg: bytes) -> bytes:
    """With Adobe's marker of an unknown transform in place of JFIF's. libjpeg takes it for YCbCr, with a warning."""
    assert jpeg[2:4] == b"\xff\xe0"
    return jpeg[:2] + b"\xff\xee\x00\x0eAdobe\x00\x64" + bytes(4) + b"\x07" + jpeg[20:]


def of_another_version(jpeg: bytes) -> bytes:
    """With the version 2.01 of JFIF. libjpeg takes it, with a warning."""
    assert jpeg[6:13] == b"JFIF\0\1\1"
    return jpeg[:11] + b"\2" + jpeg[12:]


def without_scans(jpeg: bytes, scans: int) -> bytes:
    """A progressive JPEG up to its first scans, as a file cut there: decoders smooth its blocks."""
    return jpeg[: [found.start() for found in re.finditer(b"\xff\xda", jpeg)][scans]] + b"\xff\xd9"


def without_scan(jpeg: bytes, number: int) -> bytes:
    """A progressive JPEG without one of its scans, and the tables before it."""
    head, *chunks = re.split(rb"(?=\xff[\xc4\xda\xd9])", jpeg)
    scans = np.cumsum([0, *(chunk[1] == 0xDA for chunk in chunks[:-1])])
    return head + b"".join(chunk for chunk, scan in zip(chunks, scans, strict=True) if scan != number)


def without_table(jpeg: bytes, number: int) -> bytes:
    """A JPEG of Pillow without one of its four Huffman tables. libjpeg takes the standard's, the same."""
    parts = re.split(rb"(?=\xff\xc4)", jpeg)
    assert len(parts) == 5
    table = parts[1 + number]
    parts[1 + number] = table[2 + int.from_bytes(table[2:4]) :]
    return b"".join(parts)


def progressive(seed: int, scans: int, size: tuple[int, int], **options) -> bytes:
    return without_scans(by_pillow(scene(seed, *size), progressive=True, **options), scans)


KINDS = {
    "4:2:0": lambda image: by_pillow(image, quality=90, subsampling=2),
    "4:2:2": lambda image: by_pillow(image, quality=90, subsampling=1),
    "4:4:4": lambda image: by_pillow(image, quality=95, subsampling=0),
    "4:4:0": lambda image: by_opencv(image, "440"),
    "4:1:1": lambda image: by_opencv(image, "411"),
    "grey": lambda image: by_pillow(image.convert("L"), quality=90),
    "coarse": lambda image: by_pillow(image, quality=8),
    "fine, own tables": lambda image: by_pillow(image, quality=100, optimize=True),
    "progressive": lambda image: by_pillow(image, quality=90, progressive=True),
    "restart markers": lambda image: by_pillow(image, quality=90, restart_marker_blocks=7),
    "a restart a row": lambda image: by_pillow(image, quality=90, subsampling=0, restart_marker_rows=1),
    "RGB": lambda image: by_pillow(image, quality=90, keep_rgb=True),
    "overflowing": lambda image: overflowing(by_pillow(image, quality=100, subsampling=0)),
    "unknown colours": lambda image: of_unknown_colours(by_pillow(image, quality=90)),
}


def written(path: Path, images: list[bytes] | list[Image.Image], how: str = "bytes", read: Any = None) -> Decoder:
    """A .beton of these images, as they are or with restart markers and the places of their segments, opened.

    how: bytes, segments or coefficients of JPEGs; pixels of images; or their forms, data with a table.
    """
    layout = {"segments": SEGMENTED_IMAGES, "forms": SEGMENTED_IMAGES}.get(how, IMAGES)
    layout = image_layout(COEFFICIENT_FIELDS) if how == "coefficients" else layout
    with BetonWriter(path, path.with_suffix(".journal"), len(images), layout) as writer:
        for image in images:
            writer.add(encoded(image, how))
        writer.finish()
    return Decoder(open_beton(path), read=read)


def encoded(image: Any, how: str) -> Encoded:
    if how == "pixels":
        return Encoded("", 0, RAW, *image.size, image.tobytes(), "")
    data, table = image if how == "forms" else (image, b"")
    size = Image.open(io.BytesIO(data)).size
    if how == "segments":
        data, table, _ = with_markers(data, plain_frame(data))
    if how == "coefficients":
        packed, reason = pack(data)
        assert packed, reason
        return Encoded("", 0, COEFFICIENTS, *size, packed, "")
    return Encoded("", 0, JPEG, *size, data, "", table)


def whole(decoder: Decoder, sample: int) -> Image.Image:
    """A stored image by Pillow."""
    beton = decoder.beton
    data = beton.bytes[beton.offset[sample] :][: beton.size[sample]].tobytes()
    if beton.mode[sample] == RAW:
        return Image.frombytes("RGB", (int(beton.width[sample]), int(beton.height[sample])), data)
    return Image.open(io.BytesIO(unpack(data) if beton.mode[sample] == COEFFICIENTS else data)).convert("RGB")


def assert_pillows(decoder: Decoder, epochs: int, side: int = 32) -> None:
    """Crops, resizes and flips of every sample are those of Pillow, either way of resizing."""
    beton, samples = decoder.beton, np.arange(len(decoder.beton))
    wholes = [whole(decoder, sample) for sample in samples]
    found = np.empty((len(samples), side, side, 3), np.uint8)
    for epoch in range(epochs):
        boxes = random_boxes(samples, beton.height, beton.width, 3, epoch, (0.01, 1.0), (0.5, 2.0), 0.5)
        if epoch == 0:
            boxes = centre_boxes(samples, beton.height, beton.width, 1.0)
        bicubic = cubic(samples, "random", 3, epoch)
        decoder.read(samples, boxes, bicubic, found, threads=1)
        for sample, box in enumerate(boxes):
            expected = resized_box(wholes[sample], box, bicubic[sample], side)
            assert np.array_equal(found[sample], expected), (sample, box)


# An image of 16 x 16, written by `jpegtran -arithmetic`.
ARITHMETIC = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRTc4UG1RV19iZ2hnPk"
    "1xeXBkeFxlZ2P/2wBDARESEhgVGC8aGi9jQjhCY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2P/"
    "yQARCAAQABADAREAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD/AAlD09/het29lOLo1uHVW/Rw/9k="
)


def filled(jpeg: bytes, count: int) -> bytes:
    """With so many fill bytes before its restart markers (T.81, B.1.1.2)."""
    return re.sub(rb"\xff(?=[\xd0-\xd7])", b"\xff" * (1 + count), jpeg)


def renumbered(jpeg: bytes) -> bytes:
    """A JPEG of Pillow whose Huffman tables have other numbers: of luma DC 1 and AC 3, of chroma 2 and 0."""
    tables = {b"\0": b"\1", b"\x10": b"\x13", b"\1": b"\2", b"\x11": b"\x10"}
    jpeg = re.sub(rb"(?s)(\xff\xc4..)([\0\1\x10\x11])", lambda found: found[1] + tables[found[2]], jpeg)
    assert jpeg.count(b"\1\0\2\x11\3\x11\0\x3f\0") == 1
    return jpeg.replace(b"\1\0\2\x11\3\x11\0\x3f\0", b"\1\x13\2\x20\3\x20\0\x3f\0")


def overflowing_once(kind: str) -> bytes:
    """A grey one in which only the first block overflows, by its mean or by its edges; others have edges, too."""
    pixels = np.full((48, 48, 3), 128, np.uint8)
    pixels[16:, :, :] += (np.arange(48) // 3 % 2).astype(np.uint8)[:, None]
    pixels[:8, :8] = 178 if kind == "mean" else np.where(np.arange(8) % 2, 255, 1)[:, None]
    return overflowing(by_pillow(Image.fromarray(pixels), quality=100, subsampling=0))


def of_any_tables() -> list[bytes]:
    """With the same symbols as the image before, or the same lengths; one table for all; any numbers of tables."""
    tables = (LUMA, CHROMA, LUMA, OTHERS, LUMA)
    jpegs = [crafted((40, 30), *[(1, 1)] * count, dc=table) for table in tables for count in (1, 3)]
    jpegs += [renumbered(by_pillow(scene(k, 90, 70), quality=95, subsampling=k)) for k in range(3)]
    jpegs += [crafted((8 * count, 8), (1, 1)) for count in range(1, 13)]
    assert any(jpeg.endswith(b"\xff\0\xff\xd9") for jpeg in jpegs)  # a last byte of ones
    return jpegs


def real_images() -> list[bytes]:
    jpegs = [path.read_bytes() for path in sorted(REAL.glob("val/*/*.JPEG"))[:12]]
    return [data for data in jpegs if Image.open(io.BytesIO(data)).mode == "RGB"]


PACKED = [kind for kind in KINDS if kind not in ("4:4:0", "4:1:1", "progressive", "RGB")]
MORE_SIZES = [*SIZES, (641, 480)]
PACKED_SIZES = [(5, 7), (16, 16), (17, 33), (101, 53), (333, 250), (641, 480)]
SCANS: list[dict[str, Any]] = [*({"subsampling": k} for k in range(3)), {"quality": 5}, {"keep_rgb": True}]


def cases() -> Iterator[tuple[str, str, Callable[[], list]]]:
    """What images are, how they are stored, and the images."""
    for kind, make in KINDS.items():
        yield kind, "bytes", lambda make=make: [make(scene(i, *size)) for i, size in enumerate(SIZES)]
    for kind in ("4:2:0", "4:2:2", "4:4:4", "4:1:1", "progressive"):
        make = KINDS[kind]
        yield kind, "segments", lambda make=make: [make(scene(i, *size)) for i, size in enumerate(MORE_SIZES)]
    for kind in PACKED:
        make = KINDS[kind]
        yield kind, "coefficients", lambda make=make: [make(scene(i, *size)) for i, size in enumerate(PACKED_SIZES)]
    for options in SCANS:  # whatever the library that the C code is linked to makes of them
        scans = range(1, 4 if "keep_rgb" in options else 10)
        sizes = [(k, SIZES[k % len(SIZES)]) for k in scans] + [(k, (200, 150)) for k in scans]
        make_all = lambda sizes=sizes, options=options: [progressive(k, k, size, **options) for k, size in sizes]  # noqa: E731
        yield f"without scans, {options}", "bytes", make_all
    coarse = [by_pillow(scene(k, 100, 70), progressive=True, quality=60) for k in range(2)]
    for scan in (6, 7, 8):  # of the last bit of DC, of Cr, or of Cb: the others are complete
        yield f"without scan {scan}", "bytes", lambda scan=scan: [without_scan(each, scan) for each in coarse]
    for factors in [[(2, 2)], *([y, *c] for y in ((2, 2), (2, 1)) for c in ODD)]:  # of grey they mean nothing
        both = itertools.product(((50, 41), (17, 30)), (False, True))  # also with a scan for each component
        yield str(factors), "bytes", lambda of=factors, both=[*both]: [crafted(s, *of, apart=a) for s, a in both]
    narrow = [(width, height) for width in range(1, 8) for height in (1, 2, 5, 17)]
    for k in (1, 2):  # libjpeg interpolates chroma of more than two columns alone
        options = {"quality": 95, "subsampling": k}
        yield f"narrow {k}", "bytes", lambda of=options: [by_pillow(scene(9, *size), **of) for size in narrow]
    yield "arithmetic codes", "bytes", lambda: [ARITHMETIC]
    yield "another version", "bytes", lambda: [of_another_version(by_pillow(scene(0, 30, 20)))]
    yield "any Huffman tables", "bytes", of_any_tables
    marked = [{"restart_marker_blocks": 3}, {"restart_marker_rows": 1}]  # that are read and that are searched for
    filled_up = lambda: [filled(by_pillow(scene(k, 150, 130), **of), k) for of in marked for k in (1, 2)]  # noqa: E731
    yield "fill bytes", "bytes", filled_up
    yield "one block overflows", "bytes", lambda: [overflowing_once(kind) for kind in ("mean", "edges")]
    if REAL.is_dir():
        yield "real images", "bytes", real_images
        yield "real images", "segments", real_images
    yield "scenes", "pixels", lambda: [scene(i, *size) for i, size in enumerate(SIZES)]
    # Rows first where the height shrinks by more than twice what the width does (Pillow 13): its rounding shows.
    sizes = [*itertools.product((31, 32, 33, 47, 48, 49), (20, 32, 40))]
    noise = [np.random.RandomState(sum(size)).randint(0, 256, (*size, 3)).astype(np.uint8) for size in sizes]
    yield "order of resizing", "pixels", lambda: [Image.fromarray(each) for each in noise]


READERS = pytest.mark.parametrize("read", [None, read_with_pillow], ids=["compiled", "pillow"])


@READERS
@pytest.mark.parametrize(
    ("kind", "how", "images"), [pytest.param(*each, id=" as ".join(each[:2])) for each in cases()]
)
def test_pixels_are_pillows(tmp_path, kind, how, images, read):
    decoder = written(tmp_path / "a.beton", images(), how, read)
    if how == "segments":
        assert (decoder.beton.segments_size > 12).all() == (kind != "progressive")
    assert_pillows(decoder, 1 if read else 12)


def damage_in(decoder: Decoder, *boxes: tuple[int, ...], pixels: np.ndarray | None = None) -> dict[int, str]:
    """What is wrong with the samples; of each a box is read, of all the same if there is only one."""
    count = len(decoder.beton)
    chosen = np.array([[*box, 0] for box in boxes * (count if len(boxes) == 1 else 1)])
    pixels = np.empty((count, 8, 8, 3), np.uint8) if pixels is None else pixels
    return decoder.try_read(np.arange(count), chosen, np.zeros(count), pixels, 1)


def placed(jpeg: bytes, at: int, data: bytes, instead: int = 0) -> bytes:
    """With other bytes at a place, instead of so many."""
    return jpeg[:at] + data + jpeg[at + instead :]


WHOLE, MARKED = (by_pillow(scene(2, 160, 120), quality=90, restart_marker_rows=rows) for rows in (0, 1))
TINY, TINY_MARKED = (by_pillow(scene(2, 64, 48), quality=90, restart_marker_blocks=count) for count in (0, 7))
TALL = by_pillow(scene(2, 64, 96), quality=90, restart_marker_rows=1)
MORE = [placed(WHOLE, len(WHOLE) - 2, bytes(20)), placed(MARKED, MARKED.rindex(b"\xff\xd1"), bytes(20))]
NEXT = [placed(MARKED, MARKED.index(b"\xff\xd1"), bytes(20))]  # after the first rows
FEW = [WHOLE[: -2 - count] + WHOLE[-2:] for count in (1, 2, 3, 5, 8)]
NO_END = [TINY[:-2], TINY[:-1], TINY[:-2] + b"\xff\xd3", TINY_MARKED[:-2], TINY, TINY_MARKED]
TURNS = [TALL.replace(b"\xff\xd2", bytes([0xFF, number])) for number in (0xD3, 0xD1, 0xDA)]
LARGE = [placed(TINY, TINY.index(b"\xff\xc0") + 5, (6000).to_bytes(2, "big") * 2, 4)]  # to decode: more than memory
CUT = [(scans := progressive(0, 3, (160, 120))), scans[: len(scans) // 2], scans]
EXTRANEOUS, PREMATURE = "extraneous bytes", "Corrupt JPEG data: premature end of data segment"
ALL, CORNER = (0, 0, 120, 160), (0, 0, 8, 8)
# JPEGs, the box of all that is read, and the words on each that is damaged.
DAMAGES: dict[str, tuple[list[bytes], tuple[int, ...], dict[int, str]]] = {
    "another format": ([TINY, by_pillow(scene(0, 64, 48), "PNG")], CORNER, {1: ""}),
    "a progressive scan cut": (CUT, ALL, {1: ""}),
    "bytes too many where all is read": (MORE, ALL, {0: EXTRANEOUS, 1: EXTRANEOUS}),
    "bytes too many after a crop": (MORE, CORNER, {}),
    "bytes too many after all of the rows": (NEXT, (0, 0, 30, 160), {0: EXTRANEOUS}),  # libjpeg decides
    "bytes too many after a part of the rows": (NEXT, (0, 0, 30, 100), {}),
    "bytes too few": ([*FEW, WHOLE], ALL, dict.fromkeys(range(5), PREMATURE)),
    "a scan that ends long before a crop": (LARGE, (5900, 5900, 50, 50), {0: PREMATURE}),
    "no end marker where all is read": (NO_END, (0, 0, 48, 64), dict.fromkeys(range(4), "")),
    "no end marker after a crop": (NO_END, CORNER, {}),
    "markers out of turn, passed over": (TURNS, (64, 0, 32, 64), dict.fromkeys(range(3), "")),
    "markers out of turn, in a crop": (TURNS, (48, 0, 48, 64), dict.fromkeys(range(3), "")),
    "markers out of turn, read": (TURNS, (0, 0, 96, 64), dict.fromkeys(range(3), "")),
    "no tables, which the image before has": (
        [TINY, placed(TINY, TINY.index(b"\xff\xdb") + 1, b"\xee", 1)],
        (0, 0, 48, 64),
        {1: "Quantization table 0x00 was not defined"},
    ),
}


@pytest.mark.parametrize("row", DAMAGES)
def test_damage_is_noticed_where_it_may_matter(tmp_path, row, system):
    jpegs, box, words = DAMAGES[row]
    decoder, pixels = written(tmp_path / "a.beton", jpegs), np.zeros((len(jpegs), 8, 8, 3), np.uint8)
    found = damage_in(decoder, box, pixels=pixels)
    assert list(found) == list(words)
    assert all(words[sample] in reason for sample, reason in found.items())
    system({"PIL.ImageFile.LOAD_TRUNCATED_IMAGES": True})
    for sample in set(range(len(jpegs))) - set(words):
        assert np.array_equal(pixels[sample], resized_box(whole(decoder, sample), np.array([*box, 0]), False, 8))


@pytest.mark.parametrize("row", ["another format", "a progressive scan cut"])
def test_damage_is_noticed_by_pillow_too(tmp_path, row):
    jpegs, box, words = DAMAGES[row]
    assert list(damage_in(written(tmp_path / "a.beton", jpegs, read=read_with_pillow), box)) == list(words)


def test_what_prep_never_writes_is_damage_in_segments(tmp_path):
    """A byte too many in any, and a fill byte before a zero. libjpeg takes them."""

    def inserted(at: int, more: bytes) -> tuple[bytes, bytes]:
        numbers = np.frombuffer(table, "<u4").copy()
        numbers[3:] += len(more) * (numbers[3:] > at).astype("<u4")
        return placed(data, at, more), numbers.tobytes()

    jpeg = by_pillow(scene(2, 160, 120), quality=95)
    data, table, _ = with_markers(jpeg, plain_frame(jpeg))
    places = np.frombuffer(table, "<u4")[3:].tolist()
    changed = [inserted(end, b"\x2a") for end in (*(place - 2 for place in places[1:-1]), places[-1])]
    changed.append(inserted(data.rindex(b"\xff\0"), b"\xff"))
    decoder = written(tmp_path / "a.beton", [*changed, (data, table)], "forms")
    assert list(damage_in(decoder, ALL)) == list(range(len(changed)))
    assert_pillows(written(tmp_path / "b.beton", [data for data, _ in changed[-2:]]), 2, 16)


def overwrite(path: Path, place: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


SEGMENT_DAMAGE = [*itertools.product([0, 3, 4, 9, -1], [0, 1, 10**6, 2**32 - 1])]
# The place of another segment, also of one that begins after the same marker, every eighth.
SEGMENT_DAMAGE += [(12, "4"), (4, "12"), (6, "7"), (7, "6"), (13, "5")]


@pytest.mark.parametrize(("number", "value"), SEGMENT_DAMAGE)
def test_damaged_segment_tables_never_give_wrong_pixels(tmp_path, number, value):
    """Damaged places are damage, or the very same pixels where they are not needed; another one is damage."""
    decoder, box = written(tmp_path / "a.beton", [by_pillow(scene(1, 320, 240))], "segments"), (60, 100, 90, 90)
    beton, (before, after) = decoder.beton, (np.empty((1, 32, 32, 3), np.uint8) for _ in range(2))
    assert damage_in(decoder, box, pixels=before) == {}
    place, size = int(beton.segments[0]), int(beton.segments_size[0])
    assert size > 4 * 23
    stored = int(beton.bytes[place : place + size].view("<u4")[int(value)]) if isinstance(value, str) else value
    overwrite(beton.path, place + number % (size // 4) * 4, stored.to_bytes(4, "little"))
    assert isinstance(value, int) or list(damage_in(decoder, (0, 0, 240, 320))) == [0]
    if not damage_in(decoder, box, pixels=after):
        assert np.array_equal(before, after)


@READERS
@pytest.mark.parametrize(
    ("place", "words"), [(5, r"120\D+80\D+table says \D*120\D+90"), (7, r"80\D+90\D+table says \D*120\D+90")]
)
def test_an_image_of_another_size_than_listed_is_damage(tmp_path, read, place, words):
    data = by_pillow(scene(0, 120, 90))
    decoder = written(tmp_path / "a.beton", [data], read=read)
    at = int(decoder.beton.offset[0]) + data.index(b"\xff\xc0") + place
    overwrite(decoder.beton.path, at, (80).to_bytes(2, "big"))
    assert re.search(words, damage_in(decoder, (0, 0, 9, 9))[0])


@READERS
def test_a_file_cut_short_while_it_is_read_is_damage(tmp_path, read):
    decoder = written(tmp_path / "a.beton", [by_pillow(scene(i, 120, 90)) for i in range(4)], read=read)
    beton, samples = decoder.beton, np.array([2, 0, 3])
    os.truncate(beton.path, int(beton.offset[2]) + 100)
    boxes = centre_boxes(samples, beton.height, beton.width, 1.0)
    for damaged in ((0, 2), (0, 1, 2)):
        found = decoder.try_read(samples, boxes, samples, np.empty((3, 8, 8, 3), np.uint8), threads=1)
        assert found == dict.fromkeys(damaged, "the file ends before it; it was cut short")
        beton.path.write_bytes(b"")


@READERS
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError(500 * "x"), (199 * "x", 200 * "x")),
        (ValueError("x" + 100 * "é"), ("x" + 99 * "é", "x" + 99 * "é" + "\ufffd")),  # within a character
        (MemoryError(), ("MemoryError",)),  # without words
    ],
    ids=["long", "within a character", "no words"],
)
def test_the_reason_of_pillow_is_cut_where_c_has_room(tmp_path, read, error, words, system):
    decoder = written(tmp_path / "a.beton", [progressive(0, 2, (60, 50))], read=read)
    system({"PIL.Image.open": Mock(side_effect=error)})
    assert damage_in(decoder, (0, 0, 50, 60))[0] in words


def test_what_libjpeg_warns_of_is_damage(tmp_path):
    """A byte turned over in each of many places: all of which libjpeg complains when it reads the whole image."""
    decoder = written(tmp_path / "a.beton", [by_pillow(scene(1, 320, 240), quality=95)], "segments")
    beton, numbers = decoder.beton, np.random.RandomState(0)
    data = beton.bytes[beton.offset[0] :][: beton.size[0]].tobytes()
    frame, warned = plain_frame(data), 0
    for place in numbers.randint(frame.scan, len(data) - 2, 300).tolist():
        damaged = placed(data, place, bytes([data[place] ^ 255]), 1)
        overwrite(beton.path, int(beton.offset[0]), damaged)
        try:
            theirs = with_markers(damaged, frame)[2] != ""
        except DamagedJpeg:
            theirs = True
        warned += theirs
        assert damage_in(decoder, (0, 0, 240, 320)) or not theirs
    assert warned > 60  # most of the others give an image like any, which `widemix verify` alone can tell


@pytest.mark.parametrize("size", [-3, 0, 3])
def test_pixels_in_memory_have_the_bytes_of_their_size(size, capfd):
    """Else the image is black, as FFCV, which calls this, takes no errors."""
    library = native.load() or pytest.skip("there is no compiled code")
    image = np.asarray(scene(0, 30, 20))
    data = np.append(image.reshape(-1), np.zeros(3, np.uint8))[: image.size + size].copy()
    box, found = np.array([2, 5, 9, 9, 1]), np.full((9, 9, 3), 7, np.uint8)
    library.decode_from_memory.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p, ctypes.c_int64]
    library.decode_from_memory.argtypes += [ctypes.c_void_p, *[ctypes.c_int64] * 2]
    arguments = data.ctypes.data, data.size, RAW, 20, 30, box.ctypes.data, 0, found.ctypes.data, 9, 41
    library.decode_from_memory(*arguments)
    assert np.array_equal(found, np.zeros((9, 9, 3)) if size else image[2:11, 5:14][:, ::-1])
    words = f"warning: sample 41 is damaged (has {data.size} bytes, its pixels 1800); its image is black\n"
    assert capfd.readouterr().err == (words if size else "")


@READERS
@pytest.mark.parametrize("how", ["bytes", "pixels"])
def test_views_of_a_sample_are_its_boxes_one_by_one(tmp_path, read, how):
    """Of a sample that is decoded once: some have a border, or lie beyond the image altogether."""
    images = [scene(k, 70 + k, 60) for k in range(3)]
    decoder = written(tmp_path / "a.beton", images if how == "pixels" else [*map(by_pillow, images)], how, read)
    inner, corner, beyond = (30, 40, 25, 20, 1), (-4, -5, 12, 12, 0), (80, 3, 12, 12, 0)
    edge, full, left = (52, 50, 12, 12, 1), (0, 0, 60, 70, 0), (11, -20, 12, 12, 0)
    boxes = np.array([[inner, beyond, corner, inner], [corner, left, edge, inner], [beyond, left, full, inner]])
    bicubic = np.array([[True, False, False, False], [False, True, False, True], [False, True, False, True]])
    views = [np.full((3, side, side, 3), 9, np.uint8) for side in (12, 12, 12, 20)]
    assert decoder.try_read_views(np.arange(3), boxes, bicubic, views, threads=1) == {}
    for k, sample in np.ndindex(4, 3):
        expected = resized_box(whole(decoder, sample), boxes[sample, k], bicubic[sample, k], len(views[k][0]))
        assert np.array_equal(views[k][sample], expected), (k, sample)


def test_without_the_library_pillow_decodes(tmp_path):
    decoder, box = written(tmp_path / "a.beton", [by_pillow(scene(0, 30, 20))]), [[2, 3, 17, 15, 1]]
    program = f"""
import numpy as np
from widemix.data.decode import Decoder
from widemix.formats.beton import open_beton
pixels = np.zeros((1, 9, 9, 3), np.uint8)
Decoder(open_beton({str(decoder.beton.path)!r})).read(np.arange(1), np.array({box}), np.ones(1), pixels, 1)
print(pixels.tobytes().hex())
"""
    environ = os.environ | {"WIDEMIX_NATIVE": "none", "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert "note: without compiled code images load 4 times slower" in done.stderr
    assert bytes.fromhex(done.stdout) == resized_box(whole(decoder, 0), np.array(box[0]), True, 9).tobytes()


@pytest.mark.parametrize("wrong", [1, -1, 10**8])
def test_indices_are_checked(tmp_path, wrong):
    decoder, samples = written(tmp_path / "a.beton", [by_pillow(scene(0, 30, 30))]), np.array([0, wrong])
    with pytest.raises(InputError, match=f"asked for samples .*{wrong}.* of 1$"):
        decoder.read(samples, np.zeros((2, 5), np.int64), np.zeros(2, bool), np.empty((2, 8, 8, 3), np.uint8), 1)
