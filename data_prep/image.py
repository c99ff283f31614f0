"""One image file -> the bytes that are stored in a .beton.

A JPEG that all readers decode alike keeps its coding. Everything else is decoded, rotated upright, converted to RGB,
shrunk to `max_size` and re-encoded. A `rule` names every step that the settings did not ask for.
"""

import functools
import io
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image, JpegImagePlugin

from widemix.data_prep.jpeg import (
    SAMPLINGS,
    Frame,
    check_jpeg,
    interval_for,
    pack,
    plain_frame,
    segment_table,
    shrink_jpeg,
    with_markers,
)
from widemix.data_prep.opening import BITS, PHOTOMETRIC, CorruptImage, load_image, more_than_rgb, open_image
from widemix.data_prep.records import Encoded
from widemix.data_prep.samples import FileSlice, Origin, Sample
from widemix.data_prep.settings import PAGE, PrepSettings
from widemix.errors import InputError
from widemix.formats.beton import COEFFICIENTS, JPEG, RAW
from widemix.formats.checksums import crc32c
from widemix.formats.tables import ALIGNED
from widemix.versions import older_pillow

ONLY_RGB = "and prepared images are 8-bit RGB; convert it"
MAX_SIDE, MAX_JPEG_SIDE = 65_535, 65_500  # pixels: of FFCV's records, and of libjpeg
ORIENTATION = 0x0112  # the EXIF tag
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # what makes an image of each orientation but 1 upright


def encode(sample: Sample, settings: PrepSettings) -> Encoded:
    """Encode a sample. Raises `InputError` for an image that cannot be decoded, unless the settings skip those."""
    if isinstance(sample.image, np.ndarray):
        height, width, _ = sample.image.shape
        data = sample.image.tobytes()
        pixels = Encoded(sample.name, sample.label, RAW, width, height, data, "", origin=Origin(crc32c(data)))
        return pixels._replace(targets=sample.targets).with_checksum()
    data, status = sample.image.read_with_status()
    origin = Origin(crc32c(data), status)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about unusual files; the rules below cover them
            encoded = _encode(sample, data, settings)
        if settings.encoding == "coefficients" and encoded.mode == JPEG:
            encoded = _pack(encoded)
        _check_page(encoded, len(sample.targets), settings)
    except CorruptImage as error:
        if settings.on_corrupt == "skip":
            return Encoded(sample.name, sample.label, RAW, 0, 0, b"", f"left out: {error}", origin=origin)
        raise InputError(f"{sample.name}: {error}; repair or remove it, or skip such images (on_corrupt)") from None
    place = sample.image
    source = place._replace(size=len(data)) if encoded.data is data and isinstance(place, FileSlice) else None
    return encoded._replace(source=source, origin=origin, targets=sample.targets).with_checksum()


def decode_file(path: str, settings: PrepSettings) -> np.ndarray:
    """The pixels of an image file, upright, in RGB and shrunk as `encode` has them: uint8 [height, width, 3].

    settings: with raw. Raises `InputError` for one that cannot be decoded.
    """
    file = FileSlice(path)
    try:
        encoded = _encode(Sample(path, -1, file), file.read(), settings)
    except CorruptImage as error:
        raise InputError(f"{path}: {error}") from None
    return np.frombuffer(encoded.data, np.uint8).reshape(encoded.height, encoded.width, 3)


def _check_page(encoded: Encoded, targets: int, settings: PrepSettings) -> None:
    size = len(encoded.data) + ALIGNED + len(encoded.segments) + (ALIGNED + targets if targets else 0)
    if size > (settings.page or PAGE):
        page = f"{(settings.page or PAGE) >> 20} MiB, the largest sample of a file"
        raise CorruptImage(f"takes {size / 2**20:,.1f} MiB, more than {page}; shrink images with a max_size")


def _encode(sample: Sample, data: bytes, settings: PrepSettings) -> Encoded:
    try:
        frame = plain_frame(data)
        kept = _encode_jpeg(sample, data, frame, settings) if frame and not settings.raw else None
        if kept is not None:
            return kept
        image, rules = _decode(sample.name, data, frame, settings)
    except CorruptImage:
        raise
    except Exception as error:  # Pillow's plugins raise many types
        raise CorruptImage(_error_message(data, error)) from None
    most = MAX_SIDE if settings.raw else MAX_JPEG_SIDE
    if max(image.size) > most:
        size = " x ".join(map(str, image.size))
        raise CorruptImage(f"is {size} pixels, and a side has at most {most}; shrink images with a max_size")
    if settings.raw:
        return Encoded(sample.name, sample.label, RAW, *image.size, image.tobytes(), ", ".join(rules))
    try:
        body = _jpeg(image, settings)
    except (OSError, ValueError, MemoryError) as error:
        raise CorruptImage(f"cannot be encoded ({error!r})") from None
    segments = segment_table(body) if settings.segments else b""
    return Encoded(sample.name, sample.label, JPEG, *image.size, body, ", ".join(rules), segments)


def _encode_jpeg(sample: Sample, data: bytes, frame: Frame, settings: PrepSettings) -> Encoded | None:
    """A JPEG in its own coding, shrunk plane by plane if it is large; None if that needs its pixels."""
    size, rules = (frame.width, frame.height), _wrong_suffix(sample.name, "JPEG")
    stored = settings.shrunk_size(size)
    as_coefficients = settings.encoding == "coefficients" and stored == size
    if not _is_upright(frame, data, grey=as_coefficients):
        return None
    if as_coefficients and (packed := pack(data)[0]) and len(packed) + ALIGNED <= (settings.page or PAGE):
        return Encoded(sample.name, sample.label, COEFFICIENTS, *size, packed, ", ".join(rules))
    if frame.grey:
        return None
    reencode = _keep_coding if stored == size else shrink_jpeg
    reencoded = reencode(data, frame, settings)
    if reencoded is None:
        return None
    body, segments, rule = reencoded
    rules += [rule] if rule else []
    return Encoded(sample.name, sample.label, JPEG, *stored, body, ", ".join(rules), segments)


def _decode(name: str, data: bytes, frame: Frame | None, settings: PrepSettings) -> tuple[Image.Image, list[str]]:
    """The image upright, in RGB and at the size at which it is stored, and the rules that apply to it."""
    image = open_image(data)
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):  # which Pillow scales
        kind = "floating-point" if image.mode == "F" else "32-bit integer"
        raise CorruptImage(f"has {kind} levels of an unknown range; scale them to 8 bits")
    more = more_than_rgb(data)
    if more and not settings.to_8_bit_rgb:
        raise CorruptImage(f"has {more}, {ONLY_RGB} or prepare with --to-8-bit-rgb (highest bits, first channels)")
    stored = settings.shrunk_size(image.size)
    frames = load_image(image, stored, settings.max_pixels)
    rules = [f"first of {frames} frames"] if frames > 1 else []
    rules += _wrong_suffix(name, image.format)
    if image.format in ("JPEG", "MPO") and (warning := check_jpeg(data)):  # which Pillow does not pass on
        rules.append(warning)
    turn = TURNS.get(_orientation(image))
    upright = image if turn is None else image.transpose(turn)
    rules += [] if turn is None else ["turned upright"]
    deep = image.mode.startswith("I")
    rgb, rule = _deep_grey(upright, getattr(image, "tag_v2", {})) if deep else _rgb(upright)
    rules += [f"{more} to 8-bit RGB"] if more and not deep else []
    rules += [rule] if rule else []
    if isinstance(image, JpegImagePlugin.JpegImageFile) and image.mode == "RGB" and not _known_sampling(image):
        rules.append("odd chroma sampling")
    elif image.format == "JPEG" and frame is None:
        rules.append("odd JPEG")
    turned = stored if upright.size == image.size else stored[::-1]
    if rgb.size == turned:
        return rgb, rules
    if older := older_pillow():
        rules.append(f"shrunk by Pillow {older}, not as Pillow 13 does")
    return rgb.resize(turned, Image.Resampling.LANCZOS), rules


def _pack(encoded: Encoded) -> Encoded:
    """A JPEG as its coefficients, or as it is, with a rule, if it cannot be restored from them."""
    packed, reason = pack(encoded.data)
    if packed:
        return encoded._replace(mode=COEFFICIENTS, data=packed)
    return encoded._replace(rule=", ".join(filter(None, (encoded.rule, f"kept as a JPEG: {reason}"))))


def _is_upright(frame: Frame, data: bytes, grey: bool) -> bool:
    """Whether all readers decode the frame to the same upright image; of a grey one, whether that is wanted."""
    if min(frame.width, frame.height) == 0 or not (frame.common_sampling or (grey and frame.grey)):
        return False
    if not frame.has_metadata:
        return True
    image = open_image(data)
    return image.format == "JPEG" and _orientation(image) == 1  # not MPO, which holds several images


def _keep_coding(data: bytes, frame: Frame, settings: PrepSettings) -> tuple[bytes, bytes, str] | None:
    """The JPEG with the same pixels: (bytes, table of segments, rule); None as `with_markers`."""
    if settings.segments:
        return with_markers(data, frame)
    large = len(data) + ALIGNED > (settings.page or PAGE)  # by its metadata, which are dropped then
    if not check_jpeg(data) and not large:
        return data, b"", ""
    marked = with_markers(data, frame)
    dropped = "without its metadata, which are larger than a page"
    return marked and (marked[0], b"", marked[2] or (dropped if large else ""))


def _orientation(image: Image.Image) -> int:
    """1 (upright) to 8; 1 if the image's EXIF block cannot be read or states anything else."""
    try:
        stated = image.getexif().get(ORIENTATION)
    except Exception:  # Pillow raises many types for a damaged block, which says nothing of the pixels
        return 1
    return stated if stated in TURNS else 1


def _known_sampling(image: JpegImagePlugin.JpegImageFile) -> bool:
    first, *others = ((h, v) for _, h, v, _ in image.layer)
    return first in SAMPLINGS and all(other == (1, 1) for other in others)


def _wrong_suffix(name: str, format: str | None) -> list[str]:
    """The rule for a file whose suffix is that of another format."""
    expected = _format_of_suffix("." + name.rpartition(".")[2].lower())
    actual = "JPEG" if format == "MPO" else format
    return [f"a {actual} file"] if expected and expected != actual else []


@functools.lru_cache(100)
def _format_of_suffix(suffix: str) -> str | None:
    return Image.registered_extensions().get(suffix)


def _rgb(image: Image.Image) -> tuple[Image.Image, str]:
    """The image in RGB, and the rule if its mode was another."""
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image, ""
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB"), "alpha over white"
    if mode in ("L", "1"):
        return image.convert("RGB"), "grey to RGB"
    if mode in ("P", "CMYK", "YCbCr", "LAB", "HSV"):
        return image.convert("RGB"), f"{'palette' if mode == 'P' else mode} to RGB"
    raise CorruptImage(f"has Pillow's mode {mode}, which is not supported")


def _deep_grey(image: Image.Image, tags: Mapping[int, Any]) -> tuple[Image.Image, str]:
    """Grey levels of 16 bits, or 12 of a TIFF by its tags, in RGB by the highest 8, as Pillow reads 16-bit RGB."""
    levels = np.clip(np.asarray(image), 0, 65_535)
    bits, rule = (12, "high bits") if tags.get(BITS) == (12,) else (16, "high bytes")
    grey = (levels >> (bits - 8)).astype(np.uint8)
    if tags.get(PHOTOMETRIC) == 0:  # is white, which Pillow heeds for 8 bits only
        grey = 255 - grey
    rule = f"{bits}-bit grey to RGB, {rule}"
    if "transparency" in image.info:
        grey[levels == image.info["transparency"]] = 255
        rule += ", alpha over white"
    return Image.fromarray(grey).convert("RGB"), rule


def _jpeg(image: Image.Image, settings: PrepSettings) -> bytes:
    buffer = io.BytesIO()
    if settings.segments:
        interval = interval_for(image.width, across=16)  # Pillow's 4:2:0
        image.save(buffer, "JPEG", quality=settings.quality, restart_marker_blocks=interval)
    else:
        image.save(buffer, "JPEG", quality=settings.quality)
    return buffer.getvalue()


def _error_message(data: bytes, error: Exception) -> str:
    if not data:
        return "is empty"
    if isinstance(error, Image.UnidentifiedImageError):
        with suppress(Exception):  # a damaged header says nothing
            if more := more_than_rgb(data):
                return f"has {more} in a way that Pillow cannot read, {ONLY_RGB}"
        return "is no image that Pillow can read"
    return f"cannot be decoded ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
