"""Each rule for unusual images against Pillow's own decoding."""

import io
import struct
from functools import partial

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import v2

from tests.data.crafted_jpegs import crafted
from widemix.data_prep.image import Encoded, _check_page, encode
from widemix.data_prep.jpeg import Frame, plain_frame
from widemix.data_prep.opening import CorruptImage
from widemix.data_prep.samples import FileSlice, Sample
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError
from widemix.formats.beton import JPEG, RAW

RAW_PIXELS = PrepSettings(raw=True)
PLAIN = partial(PrepSettings, restart_markers=False)


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


@pytest.mark.parametrize("size", [(40, 80), (80, 40), (333, 41), (1, 300)])
def test_large_ones_are_shrunk_to_the_longest_side(tmp_path, size, image):
    image(0, *size).save(tmp_path / "a.jpg")
    encoded = encode_file(tmp_path / "a.jpg", PrepSettings(max_size=32, raw=True))
    expected = (max(1, round(size[0] * 32 / max(size))), max(1, round(size[1] * 32 / max(size))))
    assert (encoded.width, encoded.height) == expected
    with Image.open(tmp_path / "a.jpg") as opened:
        assert np.array_equal(pixels(encoded), opened.resize(expected, Image.Resampling.LANCZOS))
    assert encoded.rule == ""
    assert encode_file(tmp_path / "a.jpg", PLAIN(max_size=0)).data == (tmp_path / "a.jpg").read_bytes()


@pytest.mark.parametrize("size", [(40, 80), (80, 40), (333, 41), (32, 500), (33, 33)])
def test_or_to_the_shortest(tmp_path, size, image):
    image(0, *size).save(tmp_path / "a.jpg")
    with Image.open(tmp_path / "a.jpg") as opened:
        expected = v2.functional.resize(opened, 32)  # torchvision's `size` is the shortest side; it rounds down
        encoded = encode_file(tmp_path / "a.jpg", PrepSettings(max_size=32, side="shortest", raw=True))
        assert min(encoded.width, encoded.height) == 32
        assert max(abs(encoded.width - expected.width), abs(encoded.height - expected.height)) <= 1
        assert np.array_equal(pixels(encoded), opened.resize((encoded.width, encoded.height), Image.LANCZOS))
    kept = encode_file(tmp_path / "a.jpg", PLAIN(max_size=min(size), side="shortest"))
    assert kept.data == (tmp_path / "a.jpg").read_bytes()


def test_quality_is_that_of_the_settings(tmp_path, image):
    image(0).save(tmp_path / "a.png")
    buffer = io.BytesIO()
    image(0).save(buffer, "JPEG", quality=77)
    assert encode_file(tmp_path / "a.png", PLAIN(quality=77)).data == buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "mode", "rule"),
    [
        ("a.jpg", "L", "grey to RGB"),
        ("a.jpg", "CMYK", "CMYK to RGB"),
        ("a.png", "P", "palette to RGB"),
        ("a.png", "1", "grey to RGB"),
        ("a.png", "RGB", ""),
        ("a.tif", "CMYK", "CMYK to RGB"),
        ("a.tif", "YCbCr", "YCbCr to RGB"),
        ("a.tif", "LAB", "LAB to RGB"),
    ],
)
def test_modes_are_converted_as_by_pillow(tmp_path, name, mode, rule, image):
    image(1, mode=mode).save(tmp_path / name)
    with Image.open(tmp_path / name) as opened:
        assert opened.mode == mode
        expected = np.asarray(opened.convert("RGB"))
    encoded = encode_file(tmp_path / name)
    assert np.array_equal(pixels(encoded), expected)
    assert encoded.rule == rule


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_laid_over_white(tmp_path, mode, image):
    opened = image(2, mode=mode)
    alpha = np.tile(np.linspace(0, 255, 40).astype(np.uint8), (30, 1))
    opened.putalpha(Image.fromarray(alpha))
    opened.save(tmp_path / "a.png")
    colour = np.asarray(image(2, mode=mode).convert("RGB")).astype(float)
    weight = alpha[..., None] / 255
    encoded = encode_file(tmp_path / "a.png")
    assert np.abs(pixels(encoded) - (colour * weight + 255 * (1 - weight))).max() <= 1
    assert encoded.rule == "alpha over white"


def test_transparent_palette_entries_are_white(tmp_path, image):
    opened = image(3, mode="P")
    opened.save(tmp_path / "a.gif", transparency=int(np.asarray(opened)[0, 0]))
    encoded = encode_file(tmp_path / "a.gif")
    assert pixels(encoded)[0, 0].tolist() == [255, 255, 255]
    assert encoded.rule == "alpha over white"


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_transparent_colour_is_white(tmp_path, mode, image):
    opened = image(3, mode=mode)
    colour = opened.getpixel((0, 0))
    opened.save(tmp_path / "a.png", transparency=colour)
    expected = np.array(opened.convert("RGB"))
    expected[(expected == expected[0, 0]).all(2)] = 255
    encoded = encode_file(tmp_path / "a.png")
    assert np.array_equal(pixels(encoded), expected)
    assert encoded.rule == "alpha over white"


def test_levels_of_floating_point_are_left_out(tmp_path, image):
    image(0, mode="F").save(tmp_path / "a.tif")
    assert encode_file(tmp_path / "a.tif").rule == "left out: has Pillow's mode F, which is not supported"


def test_16_bits_keep_their_high_byte(tmp_path):
    levels = np.arange(1200, dtype=np.uint16).reshape(30, 40) * 54
    Image.fromarray(levels).save(tmp_path / "a.png")
    encoded = encode_file(tmp_path / "a.png")
    assert np.array_equal(pixels(encoded), np.repeat((levels // 256)[..., None], 3, axis=2))
    assert encoded.rule == "16-bit grey to RGB, high bytes"


@pytest.mark.parametrize(("most", "found"), [(65_535, [0, 16, 128, 255]), (4095, [0, 1, 128, 255])])
def test_levels_of_a_pgm_keep_their_high_byte(tmp_path, most, found):
    """Of those below 65,535 as they are scaled by Pillow."""
    levels = {65_535: [255, 4096, 32_800, 65_535], 4095: [1, 16, 2048, 4095]}[most]
    (tmp_path / "a.pgm").write_bytes(b"P5\n4 1\n%d\n" % most + struct.pack(">4H", *levels))
    assert pixels(encode_file(tmp_path / "a.pgm"))[0, :, 1].tolist() == found


def write_tiff(path, data, bits, photometric, turn=1):
    """A grey TIFF of 40 x 30 pixels, uncompressed in one strip: baseline TIFF 6.0."""
    tags = {256: 40, 257: 30, 258: bits, 259: 1, 262: photometric, 273: 8, 274: turn, 277: 1, 278: 30}
    tags[279] = len(data)
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    path.write_bytes(
        b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)
    )


def test_levels_of_12_bits_keep_their_highest(tmp_path):
    levels = np.arange(1200, dtype=np.uint16).reshape(30, 40) * 3
    bits = (levels.reshape(-1, 1) >> np.arange(11, -1, -1)) & 1
    write_tiff(tmp_path / "a.tif", np.packbits(bits.astype(np.uint8)).tobytes(), 12, 1)
    encoded = encode_file(tmp_path / "a.tif")
    assert np.array_equal(pixels(encoded), np.repeat((levels // 16)[..., None], 3, axis=2))
    assert encoded.rule == "12-bit grey to RGB, high bits"


def test_16_bits_whose_0_is_white_are_inverted(tmp_path):
    levels = np.arange(1200, dtype=np.uint16).reshape(30, 40) * 54
    write_tiff(tmp_path / "a.tif", levels.astype("<u2").tobytes(), 16, 0)
    assert np.array_equal(pixels(encode_file(tmp_path / "a.tif"))[..., 0], (65_535 - levels) // 256)
    write_tiff(tmp_path / "a.tif", levels.astype("<u2").tobytes(), 16, 0, turn=3)
    assert np.array_equal(pixels(encode_file(tmp_path / "a.tif"))[..., 0], (65_535 - levels[::-1, ::-1]) // 256)


def test_16_bits_of_the_other_byte_order_keep_their_high_byte(tmp_path):
    levels = np.arange(1200, dtype=np.uint16).reshape(30, 40) * 54
    entries = {256: 40, 257: 30, 258: 16, 259: 1, 262: 1, 273: 8, 277: 1, 278: 30, 279: 2400}
    packed = b"".join(struct.pack(">HHII", tag, 4, 1, value) for tag, value in entries.items())
    head = b"MM\0*" + struct.pack(">I", 8 + 2400)
    (tmp_path / "a.tif").write_bytes(head + levels.astype(">u2").tobytes() + b"\0\x09" + packed + bytes(4))
    encoded = encode_file(tmp_path / "a.tif")
    assert np.array_equal(pixels(encoded)[..., 2], levels // 256)
    assert encoded.rule == "16-bit grey to RGB, high bytes"


def test_a_transparent_level_of_16_bits_is_white(tmp_path):
    levels = np.arange(1200, dtype=np.uint16).reshape(30, 40) * 54
    Image.fromarray(levels).save(tmp_path / "a.png", transparency=54)
    encoded = encode_file(tmp_path / "a.png")
    assert np.array_equal(pixels(encoded)[..., 1], np.where(levels == 54, 255, levels // 256))
    assert encoded.rule == "16-bit grey to RGB, high bytes, alpha over white"


@pytest.mark.parametrize("turn", range(2, 9))
def test_rotated_images_are_stored_upright(tmp_path, turn, image):
    exif = Image.Exif()
    exif[0x0112] = turn
    image(4).save(tmp_path / "a.jpg", exif=exif)
    moves = {
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1),
        6: lambda a: a.swapaxes(0, 1)[:, ::-1],
        7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
        8: lambda a: a.swapaxes(0, 1)[::-1],
    }
    with Image.open(tmp_path / "a.jpg") as opened:
        expected = moves[turn](np.asarray(opened))
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


def test_a_jpeg_of_several_pictures_gives_its_first(tmp_path, image):
    """A camera's MPO, which is named as a JPEG."""
    image(1).save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[image(2)])
    encoded = encode_file(tmp_path / "a.jpg", PLAIN())
    assert encoded.rule.split(", ")[0] == "first of 2 frames"
    assert "MPO" not in encoded.rule
    assert b"MPF" not in encoded.data
    with Image.open(tmp_path / "a.jpg") as opened:
        assert np.array_equal(pixels(encode_file(tmp_path / "a.jpg")), opened)


def test_a_png_named_jpeg_is_named(tmp_path, image):
    image(5).save(tmp_path / "a.JPEG", "PNG")
    encoded = encode_file(tmp_path / "a.JPEG")
    assert np.array_equal(pixels(encoded), image(5))
    assert encoded.rule == "a PNG file"
    image(5, mode="RGBA").save(tmp_path / "a.JPEG", "PNG")
    for settings in (RAW_PIXELS, PrepSettings()):
        assert encode_file(tmp_path / "a.JPEG", settings).rule == "a PNG file, alpha over white"


@pytest.mark.parametrize("name", ["a.b.png", "a.JPG", "a.x", "a"])
def test_a_jpeg_of_another_name_keeps_its_bytes_and_is_named(tmp_path, image, name):
    image(5).save(tmp_path / name, "JPEG")
    for settings in (PLAIN(), PrepSettings(encoding="coefficients"), PrepSettings(max_size=20)):
        assert encode_file(tmp_path / name, settings).rule == ("a JPEG file" if name == "a.b.png" else "")
    assert encode_file(tmp_path / name, PLAIN()).data == (tmp_path / name).read_bytes()


def test_an_animation_gives_its_first_frame(tmp_path, image):
    frames = [image(i) for i in range(3)]
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], lossless=True)
    encoded = encode_file(tmp_path / "a.webp")
    assert np.array_equal(pixels(encoded), frames[0])
    assert encoded.rule == "first of 3 frames"


@pytest.mark.parametrize("end", [b"\0" * 62, b"\r\n", b""])
def test_bytes_are_kept_with_padding_after_their_end(tmp_path, end, image):
    image(0).save(tmp_path / "a.jpg")
    data = (tmp_path / "a.jpg").read_bytes() + end
    (tmp_path / "a.jpg").write_bytes(data)
    assert encode_file(tmp_path / "a.jpg", PLAIN()).data == data


def test_a_jpeg_with_more_after_its_end_is_re_encoded(tmp_path, image):
    image(0).save(tmp_path / "a.jpg")
    (tmp_path / "a.jpg").write_bytes((tmp_path / "a.jpg").read_bytes() + b"more")
    encoded = encode_file(tmp_path / "a.jpg", PrepSettings())
    assert encoded.rule == "odd JPEG"
    assert encoded.data.endswith(b"\xff\xd9")
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
    buffer = io.BytesIO()
    image(0).save(buffer, "JPEG")
    frame = plain_frame(change(buffer.getvalue()))
    assert (frame is not None) is plain
    assert not plain or (frame.width, frame.height, frame.progressive) == (40, 30, False)


def test_factors_of_which_every_decoder_has_the_sampling():
    """4:4:4, 4:2:2, 4:2:0, 4:4:0 and 4:1:1, the same of both chromas."""

    def is_common(*factors):
        return Frame(8, 8, False, factors, False, 0).common_sampling

    for first in ((1, 1), (2, 1), (2, 2), (1, 2), (4, 1)):
        assert is_common(first, (1, 1), (1, 1))
        for others in ([(1, 1), (2, 1)], [(2, 1), (1, 1)], [(1, 1)], [], [(1, 1)] * 3):
            assert not is_common(first, *others)
    for first in ((1, 4), (4, 2), (3, 1), (2, 4)):
        assert not is_common(first, (1, 1), (1, 1))


def test_odd_chroma_sampling_is_re_encoded(tmp_path):
    (tmp_path / "a.jpg").write_bytes(crafted((32, 32), (2, 1), (2, 1), (2, 1)))
    assert encode_file(tmp_path / "a.jpg").rule == "odd chroma sampling"
    encoded = encode_file(tmp_path / "a.jpg", PrepSettings())
    assert encoded.mode == JPEG
    with Image.open(tmp_path / "a.jpg") as opened, Image.open(io.BytesIO(encoded.data)) as stored:
        assert [sampling for _, *sampling, _ in stored.layer] == [[2, 2], [1, 1], [1, 1]]
        assert np.array_equal(pixels(encode_file(tmp_path / "a.jpg")), opened)


def bad_files(tmp_path, image):
    image(6).save(tmp_path / "whole.jpg")
    image(6).save(tmp_path / "whole.png")
    whole = {suffix: (tmp_path / f"whole.{suffix}").read_bytes() for suffix in ("jpg", "png")}
    yield "empty.jpg", b""
    yield "text.jpg", b"not an image at all"
    for suffix, data in whole.items():
        for cut in (20, len(data) // 3, len(data) // 2, len(data) - 40):
            yield f"cut{cut}.{suffix}", data[:cut]
    for mode, options in (("RGB", {}), ("L", {}), ("CMYK", {}), ("RGB", {"progressive": True})):
        image(6, 96, 96).convert(mode).save(tmp_path / "whole.jpg", **options)
        data = (tmp_path / "whole.jpg").read_bytes()
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
    image(6, 96, 96).save(tmp_path / "a.jpg", restart_marker_rows=1)
    data = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(data[: data.index(b"\xff\xd1")] + b"\xff\xd9")
    encoded = encode_file(tmp_path / "a.jpg", PrepSettings(**settings))
    assert "Corrupt JPEG data: found marker 0xd9 instead of RST1" in encoded.rule
    if encoded.mode == JPEG:  # which then reads without a warning
        (tmp_path / "a.jpg").write_bytes(encoded.data)
        assert encode_file(tmp_path / "a.jpg", PrepSettings(raw=True)).rule == ""


def test_bad_images_are_named_or_left_out(tmp_path, image):
    for name, data in bad_files(tmp_path, image):
        (tmp_path / name).write_bytes(data)
        for keep in SETTINGS:
            with pytest.raises(InputError, match=name):
                encode_file(tmp_path / name, PrepSettings(on_corrupt="error", **keep))
        encoded = encode_file(tmp_path / name)
        assert encoded.data == b""
        assert encoded.rule.startswith("left out: ")


def test_an_image_that_memory_does_not_suffice_for_is_left_out(tmp_path, image, monkeypatch):
    def fail(*_):
        raise MemoryError

    image(0).save(tmp_path / "a.png")
    monkeypatch.setattr("widemix.data_prep.image._jpeg", fail)
    assert encode_file(tmp_path / "a.png", PrepSettings()).rule == "left out: cannot be encoded (MemoryError())"
    monkeypatch.setattr("widemix.data_prep.image.load_image", fail)
    assert encode_file(tmp_path / "a.png", PrepSettings()).rule == "left out: cannot be decoded (MemoryError)"


def test_a_missing_file_is_never_left_out(tmp_path):
    with pytest.raises(InputError, match=r"gone\.jpg: cannot be read"):
        encode_file(tmp_path / "gone.jpg", PrepSettings(on_corrupt="skip"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"quality": 0},
        {"quality": 101},
        {"max_size": -1},
        {"max_size": 65_536},
        {"max_pixels": 0},
        {"on_corrupt": "ignore"},
        {"side": "left"},
        {"fraction": 0.0},
        {"fraction": 1.01},
        {"holdout": 1.0},
        {"holdout": -0.1},
        {"length": 7},
        {"length": 65_537},
        {"vocab_size": 99},
        {"vocab_size": 1_000_001},
        {"vocab_size": 10**15},
        {"length": 10**9},
        {"per_class": -1},
        {"per_class": 5, "fraction": 0.5},
        {"splits": "train,,val"},
        {"part": "0/3"},
        {"part": "4/3"},
        {"fraction": float("nan")},
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        PrepSettings(**wrong)


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
    assert PrepSettings().as_json() == {
        "max_size": 512,
        "side": "longest",
        "quality": 90,
        "raw": False,
        "encoding": "jpeg",
        "restart_markers": True,
        "max_pixels": 178_956_970,
        "on_corrupt": "skip",
        "splits": "",
        "targets": "",
        "part": "",
        "fraction": 1.0,
        "per_class": 0,
        "holdout": 0.0,
        "length": 128,
        "vocab": "",
        "vocab_size": 30_522,
        "shuffle": False,
        "seed": 0,
    }


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
    buffer = io.BytesIO()
    image(4).save(buffer, "JPEG")
    (tmp_path / "a.jpg").write_bytes(with_exif(buffer.getvalue(), body))
    kept = encode_file(tmp_path / "a.jpg", PLAIN())
    assert (kept.rule, kept.data) == ("", (tmp_path / "a.jpg").read_bytes())
    raw = encode_file(tmp_path / "a.jpg")
    assert raw.rule == ""
    assert np.array_equal(pixels(raw), np.asarray(Image.open(buffer)))


@pytest.mark.parametrize("error", [SyntaxError, struct.error, TypeError])
def test_nor_does_any_error_of_pillows_about_it(tmp_path, image, monkeypatch, error):
    def fail(*_):
        raise error("damaged")

    image(4).save(tmp_path / "a.jpg", exif=Image.Exif())
    (tmp_path / "a.jpg").write_bytes(with_exif((tmp_path / "a.jpg").read_bytes(), b"MM"))
    monkeypatch.setattr(Image.Image, "getexif", fail)
    assert encode_file(tmp_path / "a.jpg", PLAIN()).data == (tmp_path / "a.jpg").read_bytes()


def test_a_image_larger_than_a_page_is_left_out(tmp_path, image, monkeypatch):
    monkeypatch.setattr("widemix.data_prep.image.PAGE", 3600)
    image(0, 40, 30).save(tmp_path / "a.png")
    encoded = encode_file(tmp_path / "a.png")
    assert encoded.rule.startswith("left out: takes 0.0 MiB, more than 0 MiB, the largest sample of a file; shrink")
    with pytest.raises(InputError, match=r"a\.png: takes .*shrink images with a max_size"):
        encode_file(tmp_path / "a.png", PrepSettings(raw=True, on_corrupt="error"))


@pytest.mark.parametrize("targets", [b"", bytes(8)], ids=["classes", "targets"])
@pytest.mark.parametrize("settings", [{"raw": True}, {"restart_markers": True}])
def test_the_largest_sample_of_a_page_has_room_for_its_tables(tmp_path, image, monkeypatch, settings, targets):
    """Each part but the first begins at a multiple of 4 bytes."""
    image(0).save(tmp_path / "a.png")
    sample = Sample("a.png", 3, FileSlice(str(tmp_path / "a.png")), targets)
    whole = encode(sample, PrepSettings(**settings))
    needed = len(whole.data) + 4 + len(whole.segments) + (4 + len(targets) if targets else 0)
    for page, taken in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr("widemix.data_prep.image.PAGE", page)
        assert bool(encode(sample, PrepSettings(**settings)).data) is taken


def test_an_image_may_be_as_large_as_such_a_page():
    large = Encoded("a", 0, RAW, 1700, 1700, bytes(9 << 20), "")
    _check_page(large, 0, PrepSettings(raw=True, max_size=1700))
    with pytest.raises(CorruptImage, match=r"takes 9\.0 MiB, more than 8 MiB"):
        _check_page(large, 0, PrepSettings(raw=True))


def test_pages_are_as_large_as_the_settings_let_images_be():
    pages = {size: PrepSettings(raw=True, max_size=size).page >> 20 for size in (512, 1600, 1670, 4000, 65_535, 0)}
    assert pages == {512: 0, 1600: 0, 1670: 16, 4000: 64, 65_535: 64, 0: 64}
    assert PrepSettings(side="shortest").page == 64 << 20


def test_pixels_in_memory_keep_their_targets():
    """A plug-in's source may have both."""
    image, targets = np.arange(24, dtype=np.uint8).reshape(2, 4, 3), np.array([1.5, -2], "<f4").tobytes()
    encoded = encode(Sample("a", -1, image, targets), PrepSettings())
    assert encoded.targets == targets
    assert np.array_equal(pixels(encoded), image)
