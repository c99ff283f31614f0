"""Decoding: Pillow's pixels for every kind of JPEG and box, by the C library and without it; damage is reported."""

import base64
import ctypes
import io
import re
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

import widemix.data.decode
from tests.data.crafted_jpegs import CHROMA, LUMA, OTHERS, crafted
from widemix import native
from widemix.data.decode import Decoder, centre_boxes, cubic, padded_boxes, random_boxes
from widemix.data_prep.coefficients import pack, unpack
from widemix.data_prep.image import Encoded
from widemix.data_prep.jpeg import plain_frame
from widemix.data_prep.layout import IMAGES, SEGMENTED_IMAGES, image_layout
from widemix.data_prep.restart import DamagedJpeg, with_markers
from widemix.data_prep.write import BetonWriter
from widemix.errors import InputError
from widemix.formats.beton import COEFFICIENT_FIELDS, COEFFICIENTS, JPEG, RAW, open_beton

CUBIC = Image.Resampling.BICUBIC
REAL = Path(__file__).parents[3] / "shared/data/imagenet-sample"
ODD = [[(1, 1), (2, 1)], [(1, 1), (1, 2)], [(2, 1), (1, 1)], [(1, 2), (1, 1)]]  # of chroma
SIZES = [(1, 1), (7, 5), (16, 16), (17, 33), (150, 100), (101, 153), (260, 67), (333, 250)]


@pytest.fixture(params=["compiled", "pillow"])
def way(request, monkeypatch):
    """By the C library, and by Pillow in its place."""
    if request.param == "pillow":
        monkeypatch.setattr(widemix.data.decode, "_compiled_reader", lambda: None)
    return request.param


def scene(seed: int, width: int, height: int) -> Image.Image:
    """Soft colours, hard edges and some noise, as photographs have."""
    numbers = np.random.RandomState(seed)
    soft = Image.fromarray(numbers.randint(0, 256, (4, 5, 3)).astype(np.uint8)).resize((width, height), 3)
    pixels = np.asarray(soft).astype(int)
    for _ in range(6):
        y, x = numbers.randint(0, height), numbers.randint(0, width)
        pixels[y : y + numbers.randint(1, 60), x : x + numbers.randint(1, 60)] += numbers.randint(-90, 90, 3)
    return Image.fromarray((pixels + numbers.randint(-9, 10, pixels.shape)).clip(0, 255).astype(np.uint8))


def by_pillow(image: Image.Image, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


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


def written(path: Path, jpegs: list[bytes], segments: bool = False) -> Decoder:
    """A .beton of these JPEGs, with restart markers and the places of their segments or as they are."""
    if segments:
        return written_with(path, [with_markers(data, plain_frame(data))[:2] for data in jpegs], segments)
    return written_with(path, [(data, b"") for data in jpegs], segments)


def written_with(path: Path, jpegs: list[tuple[bytes, bytes]], segments: bool) -> Decoder:
    """A .beton of these JPEGs and, if it has them, the tables of their segments."""
    layout = SEGMENTED_IMAGES if segments else IMAGES
    with BetonWriter(path, path.with_suffix(".journal"), len(jpegs), layout) as writer:
        for data, table in jpegs:
            writer.add(Encoded("", 0, JPEG, *Image.open(io.BytesIO(data)).size, data, "", table))
        writer.finish()
    return Decoder(open_beton(path))


def written_as_coefficients(path: Path, jpegs: list[bytes]) -> Decoder:
    """A .beton of the coefficients of these JPEGs."""
    layout = image_layout(COEFFICIENT_FIELDS)
    with BetonWriter(path, path.with_suffix(".journal"), len(jpegs), layout) as writer:
        for data in jpegs:
            packed, reason = pack(data)
            assert packed, reason
            writer.add(Encoded("", 0, COEFFICIENTS, *Image.open(io.BytesIO(data)).size, packed, ""))
        writer.finish()
    return Decoder(open_beton(path))


def jpeg(decoder: Decoder, sample: int) -> Image.Image:
    beton = decoder.beton
    data = beton.bytes[beton.offset[sample] :][: beton.size[sample]].tobytes()
    data = unpack(data) if beton.mode[sample] == COEFFICIENTS else data
    return Image.open(io.BytesIO(data)).convert("RGB")


def assert_pillows(decoder: Decoder, epochs: int, side: int) -> None:
    """Crops, resizes and flips of every sample are those of Pillow, either way of resizing."""
    beton, samples = decoder.beton, np.arange(len(decoder.beton))
    wholes = [jpeg(decoder, sample) for sample in samples]
    found = np.empty((len(samples), side, side, 3), np.uint8)
    for epoch in range(epochs):
        boxes = random_boxes(samples, beton.height, beton.width, 3, epoch, (0.01, 1.0), (0.5, 2.0), 0.5)
        if epoch == 0:
            boxes = centre_boxes(samples, beton.height, beton.width, 1.0)
        bicubic = cubic(samples, "random", 3, epoch)
        decoder.read(samples, boxes, bicubic, found, threads=1)
        for sample, (top, left, height, width, flip) in enumerate(boxes.tolist()):
            crop = wholes[sample].crop((left, top, left + width, top + height))
            kernel = Image.Resampling.BICUBIC if bicubic[sample] else Image.Resampling.BILINEAR
            expected = np.asarray(crop.resize((side, side), kernel))
            assert np.array_equal(found[sample], expected[:, ::-1] if flip else expected), (sample, boxes[sample])


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_pillows(tmp_path, kind, way):
    jpegs = [KINDS[kind](scene(i, *size)) for i, size in enumerate(SIZES)]
    assert_pillows(written(tmp_path / "a.beton", jpegs), 12 if way == "compiled" else 2, 32)


# An image of 16 x 16, written by `jpegtran -arithmetic`.
ARITHMETIC = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRTc4UG1RV19iZ2hnPk"
    "1xeXBkeFxlZ2P/2wBDARESEhgVGC8aGi9jQjhCY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2P/"
    "yQARCAAQABADAREAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD/AAlD09/het29lOLo1uHVW/Rw/9k="
)


def test_arithmetic_codes_are_read_as_pillow_does(tmp_path):
    assert_pillows(written(tmp_path / "a.beton", [ARITHMETIC]), 4, 16)


def test_jpegs_of_another_version_are_taken(tmp_path):
    assert_pillows(written(tmp_path / "a.beton", [of_another_version(by_pillow(scene(0, 30, 20)))]), 2, 16)


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


@pytest.mark.parametrize("factors", [[(2, 2)], *([y, *c] for y in ((2, 2), (2, 1)) for c in ODD)], ids=str)
def test_pixels_of_unusual_samplings_are_pillows(tmp_path, factors):
    """Those of a grey JPEG mean nothing. Also with a scan for each component."""
    jpegs = [crafted(size, *factors, apart=apart) for size in ((50, 41), (17, 30)) for apart in (False, True)]
    assert_pillows(written(tmp_path / "a.beton", jpegs), 3, 24)


def test_pixels_by_any_huffman_tables_are_pillows(tmp_path):
    """With the same symbols as the image before, or the same lengths; one table for all; any numbers of tables."""
    tables = (LUMA, CHROMA, LUMA, OTHERS, LUMA)
    jpegs = [crafted((40, 30), *[(1, 1)] * count, dc=table) for table in tables for count in (1, 3)]
    jpegs += [renumbered(by_pillow(scene(k, 90, 70), quality=95, subsampling=k)) for k in range(3)]
    jpegs += [crafted((8 * count, 8), (1, 1)) for count in range(1, 13)]
    assert any(jpeg.endswith(b"\xff\0\xff\xd9") for jpeg in jpegs)  # a last byte of ones
    assert_pillows(written(tmp_path / "a.beton", jpegs), 4, 24)


def test_pixels_after_fill_bytes_are_pillows(tmp_path):
    """Before restart markers that are read and that are searched for."""
    options = ({"restart_marker_blocks": 3}, {"restart_marker_rows": 1})
    wholes = [by_pillow(scene(k, 150, 130), quality=90, **each) for k, each in enumerate(options)]
    jpegs = [filled(jpeg, count) for jpeg in wholes for count in (1, 2)]
    assert all(jpeg.count(b"\xff\xff") > 5 for jpeg in jpegs)
    assert_pillows(written(tmp_path / "a.beton", jpegs), 12, 16)


@pytest.mark.parametrize("subsampling", [1, 2])
def test_pixels_of_few_columns_are_pillows(tmp_path, subsampling):
    """libjpeg interpolates chroma of more than two columns alone."""
    sizes = [(width, height) for width in range(1, 8) for height in (1, 2, 5, 17)]
    jpegs = [by_pillow(scene(k, *size), quality=95, subsampling=subsampling) for k, size in enumerate(sizes)]
    assert_pillows(written(tmp_path / "a.beton", jpegs), 3, 8)


def test_pixels_of_a_single_block_that_overflows_are_pillows(tmp_path):
    assert_pillows(written(tmp_path / "a.beton", [overflowing_once(kind) for kind in ("mean", "edges")]), 3, 24)


PACKED = [kind for kind in KINDS if kind not in ("4:4:0", "4:1:1", "progressive", "RGB")]


@pytest.mark.parametrize("kind", PACKED)
def test_pixels_of_coefficients_are_pillows(tmp_path, kind, way):
    sizes = [(5, 7), (16, 16), (17, 33), (101, 53), *([(333, 250), (641, 480)] if way == "compiled" else [])]
    jpegs = [KINDS[kind](scene(i, *size)) for i, size in enumerate(sizes)]
    decoder = written_as_coefficients(tmp_path / "a.beton", jpegs)
    assert (decoder.beton.mode == COEFFICIENTS).all()
    assert_pillows(decoder, 20 if way == "compiled" else 1, 32)


@pytest.mark.parametrize("kind", ["4:2:0", "4:2:2", "4:4:4", "4:1:1", "progressive"])
def test_pixels_of_segments_are_pillows(tmp_path, kind, way):
    jpegs = [KINDS[kind](scene(i, *size)) for i, size in enumerate([*SIZES, (641, 480)])]
    decoder = written(tmp_path / "a.beton", jpegs, segments=True)
    assert (decoder.beton.segments_size > 12).all() == (kind != "progressive")
    assert_pillows(decoder, 20 if way == "compiled" else 2, 32)


@pytest.mark.parametrize(
    "options", [{"subsampling": k} for k in range(3)] + [{"quality": 5}, {"keep_rgb": True}], ids=str
)
def test_pixels_without_scans_are_pillows(tmp_path, way, options):
    """Whatever the library that the C code is linked to makes of them."""
    count = 4 if "keep_rgb" in options else 10
    jpegs = [progressive(k, k, SIZES[k % len(SIZES)], **options) for k in range(1, count)]
    jpegs += [progressive(k, k, (200, 150), **options) for k in range(1, count)]
    assert_pillows(written(tmp_path / "a.beton", jpegs), 6 if way == "compiled" else 2, 32)


def test_damage_without_scans_is_reported(tmp_path, way):
    whole = progressive(0, 3, (150, 100))
    decoder = written(tmp_path / "a.beton", [whole, whole[: len(whole) // 2], whole])
    boxes = centre_boxes(np.arange(3), decoder.beton.height, decoder.beton.width, 1.0)
    pixels = np.zeros((3, 32, 32, 3), np.uint8)
    assert list(decoder.try_read(np.arange(3), boxes, np.zeros(3, bool), pixels, 2)) == [1]
    assert np.array_equal(pixels[0], pixels[2])


def test_the_reason_of_pillow_is_cut_where_c_has_room_for_it(tmp_path, way, monkeypatch):
    """That of an error without words is its kind."""
    decoder = written(tmp_path / "a.beton", [progressive(0, 2, (60, 50))])
    for error, words in (
        (ValueError(500 * "x"), (199 * "x", 200 * "x")),
        (ValueError("x" + 100 * "é"), ("x" + 99 * "é", "x" + 99 * "é" + "\ufffd")),  # within a character
        (MemoryError(), ("MemoryError",)),
    ):
        monkeypatch.setattr(Image, "open", Mock(side_effect=error))
        found = decoder.try_read(
            np.zeros(1, int), np.array([[0, 0, 50, 60, 0]]), np.zeros(1), np.empty((1, 8, 8, 3), np.uint8), 1
        )
        assert list(found) == [0]
        assert found[0] in words


@pytest.mark.skipif(not REAL.is_dir(), reason="real ImageNet files are not in shared/")
@pytest.mark.parametrize("segments", [False, True], ids=["original bytes", "segments"])
def test_real_images_are_pillows(tmp_path, segments):
    jpegs = [path.read_bytes() for path in sorted(REAL.glob("val/*/*.JPEG"))[:12]]
    whole = [data for data in jpegs if Image.open(io.BytesIO(data)).mode == "RGB"]
    assert len(whole) >= 8
    assert_pillows(written(tmp_path / "a.beton", whole, segments), 3, 224)


def test_raw_images_are_pillows(tmp_path, way):
    wholes = [np.asarray(scene(i, *size)) for i, size in enumerate(SIZES)]
    with BetonWriter(tmp_path / "raw.beton", tmp_path / "journal", len(wholes)) as writer:
        for whole in wholes:
            writer.add(Encoded("", 0, RAW, whole.shape[1], whole.shape[0], whole.tobytes(), ""))
        writer.finish()
    decoder = Decoder(open_beton(tmp_path / "raw.beton"))
    samples = np.arange(len(wholes))
    boxes = random_boxes(samples, decoder.beton.height, decoder.beton.width, 7, 3, (0.08, 1.0), (3 / 4, 4 / 3), 0.5)
    found = np.empty((len(samples), 24, 24, 3), np.uint8)
    decoder.read(samples, boxes, cubic(samples, "bicubic", 0, 0), found, threads=1)
    for whole, image, (top, left, height, width, flip) in zip(wholes, found, boxes.tolist(), strict=True):
        crop = Image.fromarray(whole).crop((left, top, left + width, top + height))
        expected = np.asarray(crop.resize((24, 24), Image.Resampling.BICUBIC))
        assert np.array_equal(image, expected[:, ::-1] if flip else expected)


def test_boxes_are_resized_in_the_order_of_pillow(tmp_path, way):
    """Rows first where the height shrinks by more than twice what the width does (Pillow 13): its rounding shows."""
    sizes = [(width, height) for width in (20, 32, 40) for height in (31, 32, 33, 47, 48, 49)]
    wholes = [np.random.RandomState(sum(size)).randint(0, 256, (*size[::-1], 3)).astype(np.uint8) for size in sizes]
    with BetonWriter(tmp_path / "raw.beton", tmp_path / "journal", len(wholes)) as writer:
        for size, whole in zip(sizes, wholes, strict=True):
            writer.add(Encoded("", 0, RAW, *size, whole.tobytes(), ""))
        writer.finish()
    decoder, samples = Decoder(open_beton(tmp_path / "raw.beton")), np.arange(len(sizes))
    found = np.empty((len(sizes), 32, 32, 3), np.uint8)
    boxes = np.array([[0, 0, height, width, 0] for width, height in sizes])
    decoder.read(samples, boxes, np.ones(len(sizes), bool), found, threads=1)
    for size, whole, image in zip(sizes, wholes, found, strict=True):
        assert np.array_equal(image, np.asarray(Image.fromarray(whole).resize((32, 32), CUBIC))), size


@pytest.mark.parametrize("padding", [2, 8, 40])
def test_padded_crops_have_a_black_border(tmp_path, padding, way):
    """numpy's own padding, cut at the box; at 40 pixels some boxes lie outside of the image altogether."""
    jpegs = [by_pillow(scene(i, 20 + i, 30 - i)) for i in range(10)]
    decoder = written(tmp_path / "a.beton", jpegs)
    samples, outside = np.arange(10), 0
    found = np.empty((10, 20, 20, 3), np.uint8)
    for epoch in range(6):
        boxes = padded_boxes(samples, decoder.beton.height, decoder.beton.width, 20, padding, 7, epoch, 0.5)
        decoder.read(samples, boxes, cubic(samples, "bilinear", 0, 0), found, threads=1)
        for sample, (top, left, height, width, flip) in enumerate(boxes.tolist()):
            padded = np.pad(np.asarray(jpeg(decoder, sample)), [(padding, padding), (padding, padding), (0, 0)])
            expected = padded[top + padding :, left + padding :][:height, :width]
            assert np.array_equal(found[sample], expected[:, ::-1] if flip else expected)
            outside += top < 0 or left < 0
    assert outside > 10


@pytest.mark.parametrize("mode", [JPEG, RAW])
def test_views_of_a_sample_are_its_boxes_one_by_one(tmp_path, way, mode):
    """Of a sample that is decoded once: some have a border, or lie beyond the image altogether."""
    images = [scene(k, 70 + k, 60) for k in range(3)]
    forms = [by_pillow(image) if mode == JPEG else image.tobytes() for image in images]
    with BetonWriter(tmp_path / "a.beton", tmp_path / "journal", 3) as writer:
        for image, data in zip(images, forms, strict=True):
            writer.add(Encoded("", 0, mode, *image.size, data, ""))
        writer.finish()
    decoder, samples = Decoder(open_beton(tmp_path / "a.beton")), np.arange(3)
    inner, corner, beyond = (30, 40, 25, 20, 1), (-4, -5, 12, 12, 0), (80, 3, 12, 12, 0)
    edge, whole, left = (52, 50, 12, 12, 1), (0, 0, 60, 70, 0), (11, -20, 12, 12, 0)
    boxes = np.array([[inner, beyond, corner, inner], [corner, left, edge, inner], [beyond, left, whole, inner]])
    bicubic = np.array([[True, False, False, False], [False, True, False, True], [False, True, False, True]])
    views = [np.full((3, side, side, 3), 9, np.uint8) for side in (12, 12, 12, 20)]
    assert decoder.try_read_views(samples, boxes, bicubic, views, threads=1) == {}
    for k, found in enumerate(views):
        alone = np.full(found.shape, 8, np.uint8)
        decoder.read(samples, boxes[:, k], bicubic[:, k], alone, threads=1)
        assert np.array_equal(found, alone), k
        assert found.any(axis=(1, 2, 3)).tolist() == [
            tuple(box) not in (beyond, left) for box in boxes[:, k].tolist()
        ]


def test_threads_share_the_work(tmp_path):
    decoder = written(tmp_path / "a.beton", [by_pillow(scene(i, 90, 80)) for i in range(13)], segments=True)
    samples = np.arange(13)[::-1]
    boxes = random_boxes(samples, decoder.beton.height, decoder.beton.width, 0, 0, (0.1, 1.0), (0.75, 1.33), 0.5)
    found = [np.zeros((13, 24, 24, 3), np.uint8) for _ in range(3)]
    for threads, images in zip((1, 2, 5), found, strict=True):
        decoder.read(samples, boxes, cubic(samples, "random", 0, 0), images, threads)
    assert found[0].any(axis=(1, 2, 3)).all()
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_half_of_the_images_are_cubic_at_random():
    samples = np.arange(4000)
    chosen = cubic(samples, "random", 5, 1)
    assert abs(chosen.mean() - 0.5) < 0.03
    assert np.array_equal(chosen[7:90:3], cubic(samples[7:90:3], "random", 5, 1))  # whatever the batch
    assert (chosen != cubic(samples, "random", 5, 2)).any()
    assert cubic(samples, "bicubic", 5, 1).all()
    assert not cubic(samples, "bilinear", 5, 1).any()


def test_without_the_library_pillow_decodes(monkeypatch):
    monkeypatch.setattr(native, "load", lambda: None)
    assert widemix.data.decode._compiled_reader.__wrapped__() is None


def test_indices_are_checked(tmp_path):
    decoder = written(tmp_path / "a.beton", [by_pillow(scene(0, 30, 30))])
    for wrong in (1, -1, 10**8):
        samples = np.array([0, wrong])
        with pytest.raises(InputError, match=f"asked for samples .*{wrong}.* of 1$"):
            decoder.read(samples, np.zeros((2, 5), np.int64), np.zeros(2, bool), np.empty((2, 8, 8, 3), np.uint8), 1)


def broken(path: Path, place: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


@pytest.mark.parametrize("segments", [False, True], ids=["plain", "segments"])
def test_damage_names_the_sample_and_spares_the_others(tmp_path, segments, way):
    jpegs = [by_pillow(scene(i, 120, 90)) for i in range(4)]
    decoder = written(tmp_path / "a.beton", jpegs, segments)
    beton, samples = decoder.beton, np.arange(4)
    boxes = centre_boxes(samples, beton.height, beton.width, 1.0)
    before, after = (np.zeros((4, 32, 32, 3), np.uint8) for _ in range(2))
    decoder.read(samples, boxes, samples > 1, before, threads=1)
    broken(beton.path, int(beton.offset[2]), bytes(64))
    found = decoder.try_read(samples, boxes, samples > 1, after, threads=2)
    assert list(found) == [2]
    assert np.array_equal(np.delete(before, 2, 0), np.delete(after, 2, 0))
    with pytest.raises(InputError, match=r"a\.beton: sample 2 cannot be read: .*; `widemix verify .*` lists"):
        decoder.read(samples, boxes, samples > 1, after, threads=1)


@pytest.mark.parametrize(
    ("place", "words"), [(0, r"120\D+80\D+table says \D*120\D+90"), (2, r"80\D+90\D+table says \D*120\D+90")]
)
def test_a_image_of_another_size_than_the_table_says_is_damage(tmp_path, way, place, words):
    """Of another height, and of another width."""
    decoder = written(tmp_path / "a.beton", [by_pillow(scene(0, 120, 90))])
    broken(decoder.beton.path, int(decoder.beton.offset[0]) + jpegs_height(decoder) + place, (80).to_bytes(2, "big"))
    with pytest.raises(InputError, match=rf"sample 0 cannot be read: .*{words}"):
        decoder.read(np.zeros(1, int), np.array([[0, 0, 9, 9, 0]]), np.zeros(1), np.empty((1, 8, 8, 3), np.uint8), 1)


def jpegs_height(decoder: Decoder) -> int:
    """Where the first sample's JPEG keeps its height (T.81, B.2.2)."""
    data = decoder.beton.bytes[decoder.beton.offset[0] :][: decoder.beton.size[0]].tobytes()
    return data.index(b"\xff\xc0") + 5


def test_what_libjpeg_warns_of_is_damage(tmp_path):
    """A byte turned over in each of many places: all of which libjpeg complains when it reads the whole image."""
    decoder = written(tmp_path / "a.beton", [by_pillow(scene(1, 320, 240), quality=95)], segments=True)
    beton, numbers = decoder.beton, np.random.RandomState(0)
    one, box = np.zeros(1, int), np.array([[0, 0, 240, 320, 0]])
    image = np.empty((1, 32, 32, 3), np.uint8)
    data = beton.bytes[beton.offset[0] :][: beton.size[0]].tobytes()
    frame, theirs, ours = plain_frame(data), [], []
    for place in numbers.randint(frame.scan, len(data) - 2, 300).tolist():
        damaged = data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :]
        broken(beton.path, int(beton.offset[0]), damaged)
        ours.append(bool(decoder.try_read(one, box, one, image, threads=1)))
        try:
            theirs.append(with_markers(damaged, frame)[2] != "")
        except DamagedJpeg:
            theirs.append(True)
    assert all(mine for mine, their in zip(ours, theirs, strict=True) if their)
    assert sum(theirs) > 60  # most of the others give an image like any, which `widemix verify` alone can tell


@pytest.mark.parametrize("number", [0, 3, 4, 9, -1])
@pytest.mark.parametrize("value", [0, 1, 10**6, 2**32 - 1])
def test_damaged_segment_tables_never_give_wrong_pixels(tmp_path, number, value):
    """Damaged places are damage, or the very same pixels where they are not needed."""
    decoder = written(tmp_path / "a.beton", [by_pillow(scene(1, 320, 240))], segments=True)
    beton, at = decoder.beton, decoder.beton.segments[0]
    samples, box = np.zeros(1, int), np.array([[60, 100, 90, 90, 1]])
    before, after = (np.empty((1, 32, 32, 3), np.uint8) for _ in range(2))
    decoder.read(samples, box, samples, before, threads=1)
    numbers = len(beton.bytes[at:][: beton.segments_size[0]]) // 4
    broken(beton.path, int(at) + number % numbers * 4, value.to_bytes(4, "little"))
    if not decoder.try_read(samples, box, samples, after, threads=1):
        assert np.array_equal(before, after)


def test_a_file_cut_short_while_it_is_read_is_damage_and_no_signal(tmp_path, way):
    jpegs = [by_pillow(scene(i, 120, 90)) for i in range(4)]
    decoder = written(tmp_path / "a.beton", jpegs)
    beton, samples = decoder.beton, np.array([2, 0, 3])
    with beton.path.open("r+b") as file:
        file.truncate(int(beton.offset[2]) + 100)
    boxes = centre_boxes(samples, beton.height, beton.width, 1.0)
    for damaged in ((0, 2), (0, 1, 2)):
        found = decoder.try_read(samples, boxes, samples, np.empty((3, 8, 8, 3), np.uint8), threads=1)
        assert found == dict.fromkeys(damaged, "the file ends before it; it was cut short")
        beton.path.write_bytes(b"")


@pytest.mark.parametrize("size", [-3, 0, 3])
def test_pixels_in_memory_have_as_many_bytes_as_their_size_says(size, capfd):
    """Else the image is black, as FFCV, which calls this, takes no errors."""
    library = native.load() or pytest.skip("there is no compiled code")
    whole = np.asarray(scene(0, 30, 20))
    data = np.append(whole.reshape(-1), np.zeros(3, np.uint8))[: whole.size + size].copy()
    box, found = np.array([2, 5, 9, 9, 1]), np.full((9, 9, 3), 7, np.uint8)
    library.decode_from_memory.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p, ctypes.c_int64]
    library.decode_from_memory.argtypes += [ctypes.c_void_p, *[ctypes.c_int64] * 2]
    arguments = data.ctypes.data, data.size, RAW, 20, 30, box.ctypes.data, 0, found.ctypes.data, 9, 41
    library.decode_from_memory(*arguments)
    expected = np.zeros((9, 9, 3)) if size else whole[2:11, 5:14][:, ::-1]
    assert np.array_equal(found, expected)
    words = f"warning: sample 41 is damaged (has {data.size} bytes, its pixels 1800); its image is black\n"
    assert capfd.readouterr().err == (words if size else "")


def test_bytes_too_many_are_damage_where_all_is_read(tmp_path):
    """Before the end, and before a restart marker; a crop that ends before them has the pixels of the whole."""
    plain, marked = (
        by_pillow(scene(2, 160, 120), quality=90, **options) for options in ({}, {"restart_marker_rows": 1})
    )
    marker = marked.rindex(b"\xff\xd1")
    jpegs = [plain[:-2] + bytes(20) + plain[-2:], marked[:marker] + bytes(20) + marked[marker:]]
    decoder = written(tmp_path / "a.beton", jpegs)
    samples, found = np.arange(2), np.empty((2, 8, 8, 3), np.uint8)
    whole, corner = (np.array([[0, 0, *size, 0]] * 2) for size in ((120, 160), (8, 8)))
    reasons = decoder.try_read(samples, whole, np.zeros(2), found, threads=1)
    assert all("extraneous bytes" in reasons[sample] for sample in (0, 1))
    decoder.read(samples, corner, np.zeros(2), found, threads=1)
    assert np.array_equal(found, [np.asarray(jpeg(decoder, sample))[:8, :8] for sample in samples])


def test_no_other_format_is_taken_for_a_jpeg(tmp_path, way):
    image, buffer = scene(0, 30, 20), io.BytesIO()
    image.save(buffer, "PNG")
    decoder = written(tmp_path / "a.beton", [by_pillow(image), buffer.getvalue()])
    boxes, found = np.array([[0, 0, 20, 30, 0]] * 2), np.empty((2, 8, 8, 3), np.uint8)
    assert list(decoder.try_read(np.arange(2), boxes, np.zeros(2), found, threads=1)) == [1]


def damaged(decoder: Decoder, *boxes: tuple[int, ...]) -> dict[int, str]:
    """What is wrong with the samples; of each a box is read, of all the same if there is only one."""
    count = len(decoder.beton)
    chosen = np.array([[*box, 0] for box in boxes * (count if len(boxes) == 1 else 1)])
    return decoder.try_read(np.arange(count), chosen, np.zeros(count), np.empty((count, 8, 8, 3), np.uint8), 1)


def test_a_scan_with_bytes_too_few_is_damage(tmp_path):
    whole = by_pillow(scene(2, 160, 120), quality=90)
    cut = [whole[: -2 - count] + whole[-2:] for count in (1, 2, 3, 5, 8)]
    found = damaged(written(tmp_path / "a.beton", [*cut, whole]), (0, 0, 120, 160))
    assert found == dict.fromkeys(range(5), "Corrupt JPEG data: premature end of data segment")


def test_a_scan_that_ends_long_before_a_crop_is_damage(tmp_path):
    """All that is passed over would be many times what there is in memory."""
    whole = by_pillow(scene(2, 64, 48), quality=90)
    at = whole.index(b"\xff\xc0") + 5
    large = whole[:at] + (6000).to_bytes(2, "big") * 2 + whole[at + 4 :]
    found = damaged(written(tmp_path / "a.beton", [large]), (5900, 5900, 50, 50))
    assert found == {0: "Corrupt JPEG data: premature end of data segment"}


def test_a_scan_without_the_end_marker_is_damage_where_all_is_read(tmp_path):
    whole, marked = (by_pillow(scene(2, 64, 48), quality=90, restart_marker_blocks=count) for count in (0, 7))
    jpegs = [whole[:-2], whole[:-1], whole[:-2] + b"\xff\xd3", marked[:-2], whole, marked]
    decoder = written(tmp_path / "a.beton", jpegs)
    assert list(damaged(decoder, (0, 0, 48, 64))) == [0, 1, 2, 3]
    assert damaged(decoder, (0, 0, 8, 8)) == {}


def test_restart_markers_out_of_turn_are_damage(tmp_path):
    """Whether their segment is read or passed over."""
    whole = by_pillow(scene(2, 64, 96), quality=90, restart_marker_rows=1)
    jpegs = [whole.replace(b"\xff\xd2", bytes([0xFF, number])) for number in (0xD3, 0xD1, 0xDA)]
    decoder = written(tmp_path / "a.beton", jpegs)
    for top in (0, 48, 64):
        assert set(damaged(decoder, (top, 0, 96 - top, 64))) == {0, 1, 2}


def test_what_follows_the_rows_of_a_crop_in_its_segment_is_damage(tmp_path):
    """libjpeg decides, and has to be asked for the next rows to notice."""
    whole = by_pillow(scene(2, 160, 120), quality=90, restart_marker_rows=1)
    marker = whole.index(b"\xff\xd1")
    decoder = written(tmp_path / "a.beton", [whole[:marker] + bytes(20) + whole[marker:]])
    assert "extraneous bytes" in damaged(decoder, (0, 0, 30, 160))[0]
    assert damaged(decoder, (0, 0, 30, 100)) == {}


def inserted(jpeg: bytes, at: int, data: bytes, table: bytes) -> tuple[bytes, bytes]:
    """A JPEG with more bytes at a place, and the table of its segments."""
    numbers = np.frombuffer(table, "<u4").copy()
    numbers[3:] += len(data) * (numbers[3:] > at).astype("<u4")
    return jpeg[:at] + data + jpeg[at:], numbers.tobytes()


def test_what_prep_never_writes_is_damage_in_segments(tmp_path):
    """A byte too many in any, and a fill byte before a zero. libjpeg takes them."""
    whole = by_pillow(scene(2, 160, 120), quality=95)
    data, table, _ = with_markers(whole, plain_frame(whole))
    places = np.frombuffer(table, "<u4")[3:].tolist()
    ends = [*(place - 2 for place in places[1:-1]), places[-1]]
    changed = [inserted(data, end, b"\x2a", table) for end in ends]
    changed.append(inserted(data, data.rindex(b"\xff\0"), b"\xff", table))
    decoder = written_with(tmp_path / "a.beton", [*changed, (data, table)], True)
    assert list(damaged(decoder, (0, 0, 120, 160))) == list(range(len(changed)))
    assert_pillows(written(tmp_path / "b.beton", [data for data, _ in changed[-2:]]), 2, 16)


@pytest.mark.parametrize(("number", "other"), [(9, 1), (1, 9), (3, 4), (4, 3), (10, 2)])
def test_the_place_of_another_segment_is_damage(tmp_path, number, other):
    """Also of one that begins after the same marker, every eighth."""
    decoder = written(tmp_path / "a.beton", [by_pillow(scene(1, 320, 240))], segments=True)
    beton, at = decoder.beton, int(decoder.beton.segments[0]) + 12
    table = beton.bytes[at:][: beton.segments_size[0] - 12].view("<u4")
    assert len(table) > 20
    broken(beton.path, at + 4 * number, int(table[other]).to_bytes(4, "little"))
    assert list(damaged(decoder, (0, 0, 240, 320))) == [0]


@pytest.mark.parametrize("scan", [6, 7, 8])
def test_pixels_without_a_scan_amid_others_are_pillows(tmp_path, scan):
    """Of the last bit of DC, of Cr, or of Cb: the others are complete."""
    jpegs = [without_scan(by_pillow(scene(k, 100, 70), progressive=True, quality=60), scan) for k in range(2)]
    assert_pillows(written(tmp_path / "a.beton", jpegs), 3, 32)


def without_scan(jpeg: bytes, number: int) -> bytes:
    """A progressive JPEG without one of its scans, and the tables before it."""
    head, *chunks = re.split(rb"(?=\xff[\xc4\xda\xd9])", jpeg)
    scans = np.cumsum([0, *(chunk[1] == 0xDA for chunk in chunks[:-1])])
    return head + b"".join(chunk for chunk, scan in zip(chunks, scans, strict=True) if scan != number)


def test_a_jpeg_without_its_tables_does_not_get_those_of_another(tmp_path):
    intact = by_pillow(scene(3, 40, 30), quality=90)
    table = intact.index(b"\xff\xdb")
    decoder = written(tmp_path / "a.beton", [intact, intact[: table + 1] + b"\xee" + intact[table + 2 :]])
    boxes = np.array([[0, 0, 30, 40, 0]] * 2)
    found = decoder.try_read(np.arange(2), boxes, np.zeros(2), np.empty((2, 8, 8, 3), np.uint8), threads=1)
    assert found == {1: "Quantization table 0x00 was not defined"}
