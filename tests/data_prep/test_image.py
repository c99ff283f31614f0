"""Each rule for unusual images, and for very large ones, against Pillow's own decoding."""

import functools
import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import v2

from tests.data.crafted_jpegs import crafted
from tests.data_prep.conftest import saved
from widemix.data_prep.image import decode_file, encode
from widemix.data_prep.jpeg import plain_frame
from widemix.data_prep.opening import decoded_pixels
from widemix.data_prep.samples import FileSlice, Sample
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError
from widemix.formats.beton import JPEG, RAW

RAW_PIXELS = PrepSettings(raw=True)
PLAIN = functools.partial(PrepSettings, restart_markers=False)


def encode_file(path, settings=RAW_PIXELS):
    return encode(Sample(path.name, 3, FileSlice(str(path))), settings)


def pixels(encoded):
    assert encoded.mode == RAW
    return np.frombuffer(encoded.data, np.uint8).reshape(encoded.height, encoded.width, 3)


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"subsampling": 0}, {"keep_rgb": True}, {"quality": 5}]
)
def test_ordinary_jpegs_keep_their_bytes(tmp_path, options, image):
    image(0).save(tmp_path / "a.jpg", **options)
    encoded = encode_file(tmp_path / "a.jpg", PLAIN(max_size=40))
    data = (tmp_path / "a.jpg").read_bytes()
    assert encoded[:9] == ("a.jpg", 3, JPEG, 40, 30, data, "", b"", (str(tmp_path / "a.jpg"), 0, len(data)))
    assert encoded.for_transfer() == encoded._replace(data=b"")
    assert encoded.for_transfer().parts == encoded.parts == (data,)


SIZES = {
    "longest": [(40, 80), (80, 40), (333, 41), (1, 300)],
    "shortest": [(40, 80), (80, 40), (333, 41), (32, 500), (33, 33)],
}


@pytest.mark.parametrize(("side", "size"), [(side, size) for side, sizes in SIZES.items() for size in sizes])
def test_large_images_are_shrunk_to_one_side(tmp_path, side, size, image):
    """The shortest as by torchvision, which rounds down."""
    image(0, *size).save(tmp_path / "a.jpg")
    encoded = encode_file(tmp_path / "a.jpg", PrepSettings(max_size=32, side=side, raw=True))
    with Image.open(tmp_path / "a.jpg") as opened:
        expected = [max(1, round(each * 32 / max(size))) for each in size]
        if side == "shortest":
            expected = v2.functional.resize(opened, 32).size
            assert min(encoded.width, encoded.height) == 32
        assert np.abs(np.subtract((encoded.width, encoded.height), expected)).max() <= (side == "shortest")
        assert np.array_equal(pixels(encoded), opened.resize((encoded.width, encoded.height), Image.LANCZOS))
    assert encoded.rule == ""
    for kept in (PLAIN(max_size=0), PLAIN(max_size=min(size), side="shortest")):
        assert encode_file(tmp_path / "a.jpg", kept).data == (tmp_path / "a.jpg").read_bytes()


def test_quality_is_that_of_the_settings(tmp_path, image):
    image(0).save(tmp_path / "a.png")
    assert encode_file(tmp_path / "a.png", PLAIN(quality=77)).data == saved(image(0), quality=77)


REFUSED = (
    "and prepared images are 8-bit RGB; convert it or prepare with --to-8-bit-rgb (highest bits, first channels)"
)
LEVELS = np.arange(1200, dtype=np.uint16).reshape(30, 40) * 54
BITS = np.packbits(((LEVELS // 18).reshape(-1, 1) >> np.arange(11, -1, -1) & 1).astype(np.uint8)).tobytes()


def tiff(data, bits, photometric, turn=1, order="<", channels=1, extra=0, big=False):
    """A TIFF of 40 x 30 pixels, uncompressed in one strip; big: a BigTIFF. extra: channels of no stated meaning."""
    begin, of = (16, "Q") if big else (8, "I")
    tags = {256: 40, 257: 30, 258: bits, 259: 1, 262: photometric, 273: begin, 274: turn, 277: channels, 278: 30}
    tags[279] = len(data)
    entries = [struct.pack(f"{order}HH{of}{of}", tag, 4, 1, value) for tag, value in tags.items()]
    entries += [struct.pack(f"{order}HH{of}{of}", 338, 3, extra, 0)] if extra else []
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}H", 43 if big else 42)
    head += struct.pack(f"{order}HHQ", 8, 0, 16 + len(data)) if big else struct.pack(f"{order}I", 8 + len(data))
    return head + data + struct.pack(f"{order}{'Q' if big else 'H'}", len(entries)) + b"".join(entries) + bytes(8)


def pgm(most, *levels):
    return b"P5\n4 1\n%d\n" % most + struct.pack(">4H", *levels)


def deep_png(levels):
    """A PNG of uint16 [height, width, 3], by its specification."""
    height, width, _ = levels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in levels)
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0),
        b"IDAT": zlib.compress(rows),
        b"IEND": b"",
    }
    packed = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def avif(bits):
    """An AVIF file that says it has so many bits."""
    data = bytearray(saved(Image.new("RGB", (8, 8)), "AVIF"))
    data[data.index(b"av1C") + 6] |= {10: 0x40, 12: 0x60}[bits]
    pixi = data.index(b"pixi") + 9
    data[pixi : pixi + 3] = bytes([bits] * 3)
    return bytes(data)


HIGH, GREY = "16-bit grey to RGB, high bytes", LEVELS // 256


@pytest.mark.parametrize(
    ("name", "data", "grey", "rule"),
    [
        ("a.png", saved(Image.fromarray(LEVELS), "PNG"), GREY, HIGH),
        ("a.tif", tiff(LEVELS.astype("<u2").tobytes(), 16, 1), GREY, HIGH),
        ("a.tif", tiff(LEVELS.astype(">u2").tobytes(), 16, 1, order=">"), GREY, HIGH),
        ("a.tif", tiff(LEVELS.astype("<u2").tobytes(), 16, 1, big=True), GREY, HIGH),
        # whose 0 is white, also upside down
        ("a.tif", tiff(LEVELS.astype("<u2").tobytes(), 16, 0), (65_535 - LEVELS) // 256, HIGH),
        (
            "a.tif",
            tiff(LEVELS.astype("<u2").tobytes(), 16, 0, turn=3),
            (65_535 - LEVELS[::-1, ::-1]) // 256,
            HIGH,
        ),
        ("a.tif", tiff(BITS, 12, 1), LEVELS // 18 // 16, "12-bit grey to RGB, high bits"),
        # of which one is transparent
        (
            "a.png",
            saved(Image.fromarray(LEVELS), "PNG", transparency=54),
            np.where(LEVELS == 54, 255, GREY),
            f"{HIGH}, alpha over white",
        ),
        # as Pillow scales those below 65,535
        ("a.pgm", pgm(65_535, 255, 4096, 32_800, 65_535), [[0, 16, 128, 255]], HIGH),
        ("a.pgm", pgm(4095, 1, 16, 2048, 4095), [[0, 1, 128, 255]], HIGH),
    ],
)
def test_deep_grey_keeps_its_highest_bits_if_wanted(tmp_path, name, data, grey, rule):
    (tmp_path / name).write_bytes(data)
    bits = 12 if b"4095" in data or "12" in rule else 16
    assert encode_file(tmp_path / name).rule == f"left out: has {bits} bits per level, {REFUSED}"
    encoded = encode_file(tmp_path / name, PrepSettings(raw=True, to_8_bit_rgb=True))
    assert np.array_equal(pixels(encoded), np.repeat(np.asarray(grey)[..., None], 3, axis=2))
    assert encoded.rule == rule


COLOUR = np.arange(6000, dtype=np.uint16).reshape(30, 40, 5) * 10
BYTES = COLOUR.astype(np.uint8)


@pytest.mark.parametrize(
    ("name", "data", "more", "kept"),
    [
        ("a.png", deep_png(COLOUR[..., :3]), "16 bits per level", COLOUR[..., :3] >> 8),
        ("a.tif", tiff(COLOUR[..., :3].tobytes(), 16, 2, channels=3), "16 bits per level", COLOUR[..., :3] >> 8),
        (
            "a.tif",
            tiff(COLOUR[..., :4].tobytes(), 16, 2, channels=4, extra=1),
            "4 channels and 16 bits per level",
            COLOUR[..., :3] >> 8,
        ),
        ("a.tif", tiff(BYTES.tobytes(), 8, 2, channels=5, extra=2), "5 channels", BYTES[..., :3]),
        ("a.tif", tiff(BYTES[..., :2].tobytes(), 8, 1, channels=2, extra=1), "2 channels", BYTES[..., [0, 0, 0]]),
        ("a.ppm", b"P6 # a\n 2 1 1023\n" + struct.pack(">6H", *[1023, 0] * 3), "10 bits per level", [[255, 0] * 3]),
        ("a.avif", avif(10), "10 bits per level", None),
        ("a.avif", avif(12), "12 bits per level", None),
        ("a.jp2", saved(Image.fromarray(LEVELS), "JPEG2000"), "16 bits per level", None),
        ("a.j2k", saved(Image.fromarray(LEVELS), "JPEG2000", no_jp2=True), "16 bits per level", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_more_than_8_bit_rgb_is_named_and_left_out(tmp_path, name, data, more, kept):
    (tmp_path / name).write_bytes(data)
    assert encode_file(tmp_path / name).rule == f"left out: has {more}, {REFUSED}"
    if kept is not None:
        encoded = encode_file(tmp_path / name, PrepSettings(raw=True, to_8_bit_rgb=True))
        assert np.array_equal(pixels(encoded).ravel(), np.ravel(kept))
        assert encoded.rule.startswith(f"{more} to 8-bit RGB")


def test_channels_of_which_only_some_are_alpha(tmp_path):
    """A fourth of no stated kind is; five of grey are named, and Pillow reads none of them."""
    (tmp_path / "a.tif").write_bytes(tiff(BYTES[..., :4].tobytes(), 8, 2, channels=4))
    assert encode_file(tmp_path / "a.tif").rule == "alpha over white"
    (tmp_path / "a.tif").write_bytes(tiff(BYTES.tobytes(), 8, 1, channels=5))
    words = "left out: has 5 channels in a way that Pillow cannot read, and prepared images are 8-bit RGB; convert it"
    for wanted in (False, True):
        assert encode_file(tmp_path / "a.tif", PrepSettings(to_8_bit_rgb=wanted)).rule == words


@pytest.mark.parametrize(
    ("name", "mode", "rule", "options"),
    [
        ("a.jpg", "L", "grey to RGB", {}),
        ("a.jpg", "CMYK", "CMYK to RGB", {}),
        ("a.png", "P", "palette to RGB", {}),
        ("a.png", "1", "grey to RGB", {}),
        ("a.png", "RGB", "", {}),
        ("a.tif", "CMYK", "CMYK to RGB", {}),
        ("a.tif", "YCbCr", "YCbCr to RGB", {}),
        ("a.tif", "LAB", "LAB to RGB", {}),
        ("a.JPEG", "RGB", "a PNG file", {"format": "PNG"}),
        ("a.webp", "RGB", "first of 3 frames", {"save_all": True, "lossless": True}),
        # a camera's MPO, which is named as a JPEG
        ("a.jpg", "RGB", "first of 3 frames", {"format": "MPO", "save_all": True}),
    ],
)
def test_images_are_converted_as_by_pillow(tmp_path, name, mode, rule, options, image):
    more = {"append_images": [image(2), image(3)]} if "save_all" in options else {}
    image(1, mode=mode).save(tmp_path / name, **options, **more)
    with Image.open(tmp_path / name) as opened:
        assert opened.mode == mode
        expected = np.asarray(opened.convert("RGB"))
    encoded = encode_file(tmp_path / name)
    assert np.array_equal(pixels(encoded), expected)
    assert encoded.rule == rule
    if options.get("format") == "MPO":
        stored = encode_file(tmp_path / name, PLAIN())
        assert stored.rule.split(", ")[0] == rule
        assert "MPO" not in stored.rule
        assert b"MPF" not in stored.data


def test_other_levels_are_left_out(tmp_path, image):
    """Of floating point, and integers of 32 bits, whose range is not known: they became black once."""
    image(0, mode="F").save(tmp_path / "a.tif")
    words = "left out: has {} levels of an unknown range; scale them to 8 bits"
    assert encode_file(tmp_path / "a.tif").rule == words.format("floating-point")
    Image.fromarray(np.array([[0, 100, 200, 255]], np.int32)).save(tmp_path / "b.tif")
    assert encode_file(tmp_path / "b.tif").rule == words.format("32-bit integer")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "RGB", "L", "P"])
def test_alpha_or_a_transparent_colour_is_laid_over_white(tmp_path, mode, image):
    opened, weight = image(3, mode=mode), np.tile(np.linspace(0, 255, 40).astype(np.uint8), (30, 1))
    colour, options = np.asarray(opened.convert("RGB")).astype(float), {}
    if mode.endswith("A"):
        opened.putalpha(Image.fromarray(weight))
    else:
        options["transparency"] = opened.getpixel((0, 0))
        levels = np.asarray(opened).reshape(30, 40, -1)
        weight = np.where((levels == levels[0, 0]).all(2), 0, 255)
    opened.save(tmp_path / "a.png", **options)
    encoded, weight = encode_file(tmp_path / "a.png"), weight[..., None] / 255
    assert np.abs(pixels(encoded) - (colour * weight + 255 * (1 - weight))).max() <= mode.endswith("A")
    assert encoded.rule == "alpha over white"
    image(5, mode="RGBA").save(tmp_path / "b.JPEG", "PNG")
    for settings in (RAW_PIXELS, PrepSettings()):
        assert encode_file(tmp_path / "b.JPEG", settings).rule == "a PNG file, alpha over white"


@pytest.mark.parametrize("turn", range(2, 9))
def test_rotated_images_are_stored_upright(tmp_path, turn, image):
    exif = Image.Exif()
    exif[0x0112] = turn
    image(4).save(tmp_path / "a.jpg", exif=exif)
    moves = ["", "lr", "ud+lr", "ud", "T", "T+lr", "T+ud+lr", "T+ud"]  # of EXIF's orientations, from 1 on
    done = {
        "lr": lambda a: a[:, ::-1],
        "ud": lambda a: a[::-1],
        "T": lambda a: a.swapaxes(0, 1),
    }
    with Image.open(tmp_path / "a.jpg") as opened:
        expected = functools.reduce(lambda a, move: done[move](a), moves[turn - 1].split("+"), np.asarray(opened))
    encoded = encode_file(tmp_path / "a.jpg")
    assert np.array_equal(pixels(encoded), expected)
    assert encoded.rule == "turned upright"
    assert encode_file(tmp_path / "a.jpg", PrepSettings()).rule == "turned upright"
    small = encode_file(tmp_path / "a.jpg", PrepSettings(raw=True, max_size=20))
    assert (small.width, small.height) == ((20, 15) if turn < 5 else (15, 20))
    shrunk = Image.fromarray(expected).resize((small.width, small.height), Image.Resampling.LANCZOS)
    assert np.array_equal(pixels(small), shrunk)


def test_an_orientation_in_xmp_counts_too(tmp_path, image):
    image(4).save(tmp_path / "a.jpg", xmp=b'<x tiff:Orientation="6"/>')
    encoded = encode_file(tmp_path / "a.jpg", PLAIN())
    assert (encoded.width, encoded.height, encoded.rule) == (30, 40, "turned upright")


@pytest.mark.parametrize("name", ["a.b.png", "a.JPG", "a.x", "a"])
def test_a_jpeg_of_another_name_keeps_its_bytes(tmp_path, image, name):
    image(5).save(tmp_path / name, "JPEG")
    for settings in (PLAIN(), PrepSettings(encoding="coefficients"), PrepSettings(max_size=20)):
        assert encode_file(tmp_path / name, settings).rule == ("a JPEG file" if name == "a.b.png" else "")
    assert encode_file(tmp_path / name, PLAIN()).data == (tmp_path / name).read_bytes()


@pytest.mark.parametrize(("end", "rule"), [(b"\0" * 62, ""), (b"\r\n", ""), (b"", ""), (b"more", "odd JPEG")])
def test_bytes_are_kept_with_padding_alone_after_their_end(tmp_path, end, rule, image):
    data = saved(image(0)) + end
    (tmp_path / "a.jpg").write_bytes(data)
    stored = encode_file(tmp_path / "a.jpg", PLAIN())
    assert (stored.data == data, stored.rule) == (rule == "", rule)
    assert stored.data.endswith(end if not rule else b"\xff\xd9")
    assert np.array_equal(pixels(encode_file(tmp_path / "a.jpg")), Image.open(tmp_path / "a.jpg"))


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        (lambda d: d, True),
        (lambda d: d[:2] + b"\xff\xff" + d[2:], True),  # fill bytes before a marker
        (lambda d: d.replace(b"\xff\xc0", b"\xff\xc1", 1), True),  # extended sequential coding
        (
            lambda d: d.replace(b"\xff\xc0", b"\xff\xc0\x00\x11" + bytes([8]) * 15 + b"\xff\xc0", 1),
            False,
        ),  # two frames
        (lambda d: d + b" ", True),
        (lambda d: d.replace(b"\xff\xc0", b"\xff\xc9", 1), False),  # arithmetic coding
        (lambda d: d.replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c", 1), False),  # 12 bits
        (lambda d: d.replace(b"\xff\xc4", b"\xff\xed"), False),  # no Huffman tables
        (lambda d: d[2:], False),
        (lambda d: d[:300] + d[-2:], False),
        (lambda d: b"", False),
        (lambda d: d[:4], False),
    ],
)
def test_plain_jpegs_are_recognised_by_their_markers(image, change, plain):
    frame = plain_frame(change(saved(image(0))))
    assert (frame is not None) is plain
    assert not plain or (frame.width, frame.height, frame.progressive) == (40, 30, False)


ONE = (1, 1)
ODD = [[(2, 1)] * 3, [ONE, (2, 1), ONE], [ONE, ONE, (2, 1)]]
ODD += [[first, ONE, ONE] for first in ((1, 4), (4, 2), (3, 1), (2, 4))]


@pytest.mark.parametrize("factors", ODD, ids=str)
def test_odd_chroma_sampling_is_re_encoded(tmp_path, factors):
    (tmp_path / "a.jpg").write_bytes(crafted((32, 32), *factors))
    assert encode_file(tmp_path / "a.jpg").rule == "odd chroma sampling"
    encoded = encode_file(tmp_path / "a.jpg", PrepSettings())
    assert encoded.mode == JPEG
    with Image.open(tmp_path / "a.jpg") as opened, Image.open(io.BytesIO(encoded.data)) as stored:
        assert [sampling for _, *sampling, _ in stored.layer] == [[2, 2], [1, 1], [1, 1]]
        assert np.array_equal(pixels(encode_file(tmp_path / "a.jpg")), opened)


def bad_files(image):
    whole = {"jpg": saved(image(6)), "png": saved(image(6), "PNG")}
    yield "empty.jpg", b""
    yield "text.jpg", b"not an image at all"
    for suffix, data in whole.items():
        for cut in (20, len(data) // 3, len(data) // 2, len(data) - 40):
            yield f"cut{cut}.{suffix}", data[:cut]
    for mode, options in (("RGB", {}), ("L", {}), ("CMYK", {}), ("RGB", {"progressive": True})):
        data = saved(image(6, 96, 96).convert(mode), **options)
        for after in (b"", b"more"):  # after the end marker
            yield f"ended {mode} {len(options)} {len(after)}.jpg", data[: len(data) - 40] + b"\xff\xd9" + after
    size = whole["jpg"].index(b"\xff\xc0") + 5
    yield "no height.jpg", whole["jpg"][:size] + b"\0\0" + whole["jpg"][size + 2 :]


SETTINGS = (
    {},
    {"max_size": 8},
    {"raw": True},
    {"raw": True, "max_size": 8},
    {"restart_markers": False},
    {"encoding": "coefficients"},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_libjpeg_warns_of_is_named_however_it_is_stored(tmp_path, image, settings):
    """A JPEG that is cut between two restart markers, of whose end libjpeg makes grey pixels."""
    data = saved(image(6, 96, 96), restart_marker_rows=1)
    (tmp_path / "a.jpg").write_bytes(data[: data.index(b"\xff\xd1")] + b"\xff\xd9")
    encoded = encode_file(tmp_path / "a.jpg", PrepSettings(**settings))
    assert "Corrupt JPEG data: found marker 0xd9 instead of RST1" in encoded.rule
    if encoded.mode == JPEG:  # which then reads without a warning
        (tmp_path / "a.jpg").write_bytes(encoded.data)
        assert encode_file(tmp_path / "a.jpg", PrepSettings(raw=True)).rule == ""


def test_bad_images_are_named_or_left_out(tmp_path, image):
    for name, data in bad_files(image):
        (tmp_path / name).write_bytes(data)
        for keep in SETTINGS:
            with pytest.raises(InputError, match=name):
                encode_file(tmp_path / name, PrepSettings(on_corrupt="error", **keep))
        encoded = encode_file(tmp_path / name)
        assert encoded.data == b""
        assert encoded.rule.startswith("left out: ")


@pytest.mark.parametrize(
    ("function", "rule"),
    [("save", "cannot be encoded (MemoryError())"), ("convert", "cannot be decoded (MemoryError)")],
)
def test_what_memory_does_not_suffice_for_is_left_out(tmp_path, image, system, function, rule):
    def fail(*_, **__):
        raise MemoryError

    image(0, mode="P").save(tmp_path / "a.png")
    system({f"PIL.Image.Image.{function}": fail})
    assert encode_file(tmp_path / "a.png", PrepSettings()).rule == f"left out: {rule}"


def test_a_missing_file_is_never_left_out(tmp_path):
    with pytest.raises(InputError, match=r"gone\.jpg: cannot be read"):
        encode_file(tmp_path / "gone.jpg", PrepSettings(on_corrupt="skip"))


@pytest.mark.parametrize(
    "least_or_most",
    [
        {"max_size": 65_535, "quality": 1, "length": 8, "vocab_size": 100, "max_pixels": 1, "part": "3/3"},
        {"quality": 100, "length": 65_536, "vocab_size": 1_000_000, "fraction": 1.0, "per_class": 1, "part": "1/1"},
    ],
)
def test_settings_at_their_limits_are_taken(least_or_most):
    assert least_or_most.items() <= PrepSettings(**least_or_most).as_json().items()


def test_the_settings_that_a_manifest_does_not_state():
    """Data that were prepared before a setting came are compared with these."""
    images = {"max_size": 512, "side": "longest", "quality": 90, "raw": False, "encoding": "jpeg"}
    images |= {"restart_markers": True, "max_pixels": 178_956_970, "to_8_bit_rgb": False, "on_corrupt": "skip"}
    chosen = {"splits": "", "targets": "", "part": "", "fraction": 1.0, "per_class": 0, "holdout": 0.0}
    text = {"length": 128, "vocab": "", "vocab_size": 30_522}
    assert PrepSettings().as_json() == images | chosen | text | {"shuffle": False, "seed": 0}


def with_exif(jpeg: bytes, body: bytes) -> bytes:
    """A JPEG with an EXIF segment of these bytes."""
    segment = b"Exif\0\0" + body
    return jpeg[:2] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + jpeg[2:]


def orientation(kind: int, count: int, value: bytes) -> bytes:
    """A TIFF block with one tag, the orientation, of this type, count and value."""
    entry = (0x0112).to_bytes(2, "big") + kind.to_bytes(2, "big") + count.to_bytes(4, "big") + value.ljust(4, b"\0")
    return b"MM\0*" + (8).to_bytes(4, "big") + b"\0\1" + entry + bytes(4)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"II*\0",
        b"II*\0\xff\xff\xff\xff",
        b"MM\0*\0\0\0\x08\xff\xff" + b"\x99" * 60,
        bytes(range(256)),
        orientation(3, 1, b"\0\0"),
        orientation(3, 1, b"\0\x09"),
        orientation(2, 2, b"6\0"),
        orientation(12, 1, b"\xff\xff\xff\xff"),
        orientation(3, 2**31, b"\0\6"),
    ],
    ids=lambda body: body[:12].hex(),
)
def test_a_damaged_exif_block_says_nothing_of_the_image(tmp_path, image, body):
    """Nor does an orientation of another value than 1 to 8."""
    plain = saved(image(4))
    (tmp_path / "a.jpg").write_bytes(with_exif(plain, body))
    kept = encode_file(tmp_path / "a.jpg", PLAIN())
    assert (kept.rule, kept.data) == ("", (tmp_path / "a.jpg").read_bytes())
    raw = encode_file(tmp_path / "a.jpg")
    assert raw.rule == ""
    assert np.array_equal(pixels(raw), Image.open(io.BytesIO(plain)))


@pytest.mark.parametrize("error", [SyntaxError, struct.error, TypeError])
def test_nor_does_any_error_of_pillows_about_it(tmp_path, image, system, error):
    def fail(*_):
        raise error("damaged")

    image(4).save(tmp_path / "a.jpg", exif=Image.Exif())
    (tmp_path / "a.jpg").write_bytes(with_exif((tmp_path / "a.jpg").read_bytes(), b"MM"))
    system({"PIL.Image.Image.getexif": fail})
    assert encode_file(tmp_path / "a.jpg", PLAIN()).data == (tmp_path / "a.jpg").read_bytes()


def test_an_image_larger_than_a_page_is_left_out(tmp_path, image, limits):
    limits({"widemix.data_prep.image.PAGE": 3600})
    image(0, 40, 30).save(tmp_path / "a.png")
    encoded = encode_file(tmp_path / "a.png")
    assert encoded.rule.startswith("left out: takes 0.0 MiB, more than 0 MiB, the largest sample of a file; shrink")
    with pytest.raises(InputError, match=r"a\.png: takes .*shrink images with a max_size"):
        encode_file(tmp_path / "a.png", PrepSettings(raw=True, on_corrupt="error"))


@pytest.mark.parametrize("targets", [b"", bytes(8)], ids=["classes", "targets"])
@pytest.mark.parametrize("settings", [{"raw": True}, {"restart_markers": True}])
def test_the_largest_sample_has_room_for_its_tables(tmp_path, image, limits, settings, targets):
    """Each part but the first begins at a multiple of 4 bytes."""
    image(0).save(tmp_path / "a.png")
    sample = Sample("a.png", 3, FileSlice(str(tmp_path / "a.png")), targets)
    whole = encode(sample, PrepSettings(**settings))
    needed = len(whole.data) + 4 + len(whole.segments) + (4 + len(targets) if targets else 0)
    for page, taken in ((needed, True), (needed - 1, False)):
        limits({"widemix.data_prep.image.PAGE": page})
        assert bool(encode(sample, PrepSettings(**settings)).data) is taken


def test_pages_are_as_large_as_the_settings_let_images_be(tmp_path):
    pages = {size: PrepSettings(raw=True, max_size=size).page >> 20 for size in (512, 1600, 1670, 4000, 65_535, 0)}
    assert pages == {512: 0, 1600: 0, 1670: 16, 4000: 64, 65_535: 64, 0: 64}
    assert PrepSettings(side="shortest").page == 64 << 20
    for side, most, words in ((1700, 1700, ""), (4800, 0, "takes 65.9 MiB, more than 64 MiB")):
        Image.new("RGB", (side, side)).save(tmp_path / "a.png")
        encoded = encode_file(tmp_path / "a.png", PrepSettings(raw=True, max_size=most))
        assert len(encoded.data) == (0 if words else 3 * side**2)
        assert words in encoded.rule


def test_pixels_in_memory_keep_their_targets():
    """A plug-in's source may have both."""
    image, targets = np.arange(24, dtype=np.uint8).reshape(2, 4, 3), np.array([1.5, -2], "<f4").tobytes()
    encoded = encode(Sample("a", -1, image, targets), PrepSettings())
    assert encoded.targets == targets
    assert np.array_equal(pixels(encoded), image)


LONG = [{"max_size": 0}, {"max_size": 64, "side": "shortest"}, {"max_size": 0, "raw": True}]


@pytest.fixture
def stored(tmp_path, image):
    """`stored(name, width, height, **options)`: the path of an image file, in the format of its name."""

    def make(name, width, height, mode="RGB", **options):
        small = image(width, 160, 80, mode=mode)
        small.resize((width, height), Image.Resampling.BICUBIC).save(tmp_path / name, **options)
        return tmp_path / name

    return make


def encode_with(path, **settings):
    return encode_file(path, PrepSettings(**settings))


@pytest.mark.parametrize("settings", LONG)
def test_a_side_that_no_file_can_hold_is_left_out(stored, settings):
    path = stored("a.png", 70_000, 3)
    words = "is 70000 x 3 pixels, and a side has at most 655[03][05]; shrink images with a max_size"
    assert encode_with(path, **settings).data == b""
    with pytest.raises(InputError, match=rf"a\.png: {words}"):
        encode_with(path, on_corrupt="error", **settings)
    assert encode_with(stored("b.png", 3, 70_000), **settings).rule.startswith("left out: is 3 x 70000 pixels")
    shrunk = encode_with(path, raw=True)
    with Image.open(path) as image:
        assert shrunk.data == image.resize((512, 1), Image.Resampling.LANCZOS).tobytes()


def test_the_longest_sides(stored):
    path = stored("a.png", 65_535, 1)
    assert encode_with(path, raw=True, max_size=0).data == Image.open(path).tobytes()
    assert encode_with(path, max_size=65_535).rule.startswith(
        "left out: is 65535 x 1 pixels, and a side has at most 65500"
    )
    assert encode_with(stored("b.png", 65_500, 1), max_size=0).width == 65_500


@pytest.mark.parametrize("mode", ["L", "CMYK"])
@pytest.mark.parametrize(("width", "scaled"), [(100, (202, 101)), (150, (403, 202))], ids=["an eighth", "a quarter"])
def test_a_large_jpeg_is_scaled_down_while_it_is_decoded(stored, mode, width, scaled):
    path, size, most = stored("a.jpg", 1610, 805, mode=mode), (width, width // 2), scaled[0] * scaled[1]
    found = encode_with(path, raw=True, max_size=width, max_pixels=most)
    with Image.open(path) as image:
        image.draft(None, (2 * size[0], 2 * size[1]))
        assert image.size == scaled
        expected = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
        whole = Image.open(path).convert("RGB").resize(size, Image.Resampling.LANCZOS)
    pixels = np.frombuffer(found.data, np.uint8).reshape(*size[::-1], 3)
    assert np.array_equal(pixels, expected)
    assert np.abs(pixels - np.asarray(whole, int)).mean() < 1
    assert encode_with(path, raw=True, max_size=width).data == whole.tobytes()
    assert encode_with(path, raw=True, max_size=width, max_pixels=most - 1).data == b""


def test_so_are_others_that_need_their_pixels(stored, image):
    """One of several pictures; one that is turned; and one that is shrunk plane by plane, both by an eighth."""
    path, few = stored("a.jpg", 1610, 805), {"max_size": 100, "max_pixels": 202 * 101}
    Image.open(path).save(path.with_name("b.jpg"), "MPO", save_all=True, append_images=[image(0)])
    found = encode_with(path.with_name("b.jpg"), **few)
    assert (found.width, found.height, found.rule) == (100, 50, "first of 2 frames")
    small = encode_with(path, **few)
    assert small.mode == JPEG
    assert small.data == encode_with(path, max_size=100).data
    with Image.open(path) as opened:
        whole = np.asarray(opened.resize((100, 50), Image.Resampling.LANCZOS), int)
    assert np.abs(np.asarray(Image.open(io.BytesIO(small.data))) - whole).mean() < 3
    exif = Image.Exif()
    exif[0x0112] = 6
    path = stored("c.jpg", 1605, 801, exif=exif)
    for most in (10**8, 10**5):
        turned = encode_with(path, raw=True, max_size=100, max_pixels=most)
        assert (turned.width, turned.height, turned.rule) == (50, 100, "turned upright")


@pytest.mark.parametrize(("name", "options"), [("a.jpg", {"progressive": True}), ("a.png", {}), ("a.webp", {})])
def test_what_is_held_whole_counts_whole(stored, name, options):
    path = stored(name, 1600, 800, **options)
    words = "left out: has 1,280,000 pixels, more than max_pixels 1,279,999, which can be set higher"
    assert encode_with(path, max_size=100, max_pixels=1_279_999).rule == words
    assert encode_with(path, max_size=100, max_pixels=1_280_000).width == 100


def test_a_jpeg_that_is_kept_is_not_decoded(stored):
    path = stored("a.jpg", 1600, 800)
    settings = {"max_size": 0, "restart_markers": False, "max_pixels": 1}
    assert encode_with(path, **settings).data == path.read_bytes()


@pytest.mark.parametrize("name", ["a.jpg", "grey.jpg", "a.png", "a.webp", "a.gif", "a.tif", "a.avif"])
def test_pillows_limit_of_the_process_neither_counts_nor_changes(stored, name, system):
    mode = {"grey.jpg": "L", "a.gif": "P"}.get(name, "RGB")
    path = stored(name, 160, 80, mode=mode, **({"save_all": True} if name == "a.gif" else {}))
    before = encode_with(path)
    system({"PIL.Image.MAX_IMAGE_PIXELS": 1000})
    with pytest.raises(Image.DecompressionBombError):
        Image.open(path)
    assert encode_with(path) == before
    with ThreadPoolExecutor(8) as threads:
        pixels = list(threads.map(decode_file, [str(path)] * 40, [PrepSettings(raw=True)] * 40))
    assert all(np.array_equal(found, pixels[0]) for found in pixels)
    assert Image.MAX_IMAGE_PIXELS == 1000
    path.with_name("no image").touch()
    assert encode_with(path.with_name("no image")).rule == "left out: is empty"
    assert Image.MAX_IMAGE_PIXELS == 1000
    system({"PIL.Image.MAX_IMAGE_PIXELS": None})
    assert np.array_equal(decode_file(str(path), PrepSettings(raw=True)), pixels[0])


def test_how_much_of_a_jpeg_is_held():
    assert decoded_pixels((20_000, 10_000), (512, 256), progressive=False) == 2500 * 1250
    assert decoded_pixels((20_000, 10_000), (512, 256), progressive=True) == 20_000 * 10_000
    assert decoded_pixels((2047, 1024), (512, 256), progressive=False) == 2047 * 1024
    assert decoded_pixels((2048, 1025), (512, 256), progressive=False) == 1024 * 513
