"""One picture as it lies on disk -> the bytes that a .beton holds.

A JPEG that every reader decodes alike keeps its own bytes. Everything else is decoded, turned upright, made RGB,
shrunk to `max_size` and encoded anew; where that took more than the settings ask for, the rule is named.
"""

import functools
import io
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps, JpegImagePlugin

from data_prep.jpeg import SAMPLINGS, Frame, plain_frame
from data_prep.restart import interval_for, segment_table, with_markers
from data_prep.samples import FileSlice, Sample
from data_prep.settings import PrepSettings
from data_prep.shrink import shrink, shrink_jpeg, shrunk
from pipeline.errors import InputError
from pipeline.formats.beton import JPEG, RAW

ORIENTATION = 0x0112  # the EXIF tag


class Encoded(NamedTuple):
    """A sample ready to be written; without `data` and `source` where a bad picture is left out.

    `segments` is the table of its restart segments, in files that have that field. Where the file's own bytes are
    kept, `source` says where they lie, and `data` may do without them.
    """

    name: str
    label: int
    mode: int  # JPEG or RAW
    width: int  # pixels
    height: int  # pixels
    data: bytes
    rule: str  # what had to be done to an odd picture, or ""
    segments: bytes = b""
    source: FileSlice | None = None

    @property
    def parts(self) -> tuple[bytes, ...]:
        data = self.source.read() if self.source and not self.data else self.data
        return tuple(part for part in (data, self.segments) if part)

    def light(self) -> "Encoded":
        """The same without bytes that can be read where they come from: for the way to another process."""
        return self._replace(data=b"") if self.source else self

    def row(self, positions: Sequence[int]) -> tuple:
        """The record in the file's table of samples, for parts at these positions."""
        image = self.mode, self.width, self.height, positions[0]
        return (image, self.label, (positions[1], len(self.segments))) if self.segments else (image, self.label)


class _BadPicture(Exception):
    pass


def encode(sample: Sample, settings: PrepSettings) -> Encoded:
    """The bytes to store, or `InputError` naming a picture that cannot be decoded (unless those are skipped)."""
    if isinstance(sample.picture, np.ndarray):
        height, width, _ = sample.picture.shape
        return Encoded(sample.name, sample.label, RAW, width, height, sample.picture.tobytes(), "")
    data = sample.picture.read()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's remarks on odd files, which the rules below settle
            encoded = _encode(sample, data, settings)
    except _BadPicture as error:
        if settings.on_bad == "skip":
            return Encoded(sample.name, sample.label, RAW, 0, 0, b"", f"left out: {error}")
        raise InputError(f"{sample.name}: {error}; mend or remove it, or skip such pictures") from None
    return encoded._replace(source=sample.picture._replace(size=len(data))) if encoded.data is data else encoded


def _encode(sample: Sample, data: bytes, settings: PrepSettings) -> Encoded:
    frame = plain_frame(data)
    try:
        if frame and not settings.raw and _upright(frame, data):
            size, rules = (frame.width, frame.height), _named_otherwise(sample.name, "JPEG")
            stored = shrunk(size, settings)
            again = _coded_again if stored == size else shrink_jpeg
            coded = again(data, frame, settings)
            if coded is not None:
                body, segments, rule = coded
                rules += [rule] if rule else []
                return Encoded(sample.name, sample.label, JPEG, *stored, body, ", ".join(rules), segments)
        image = Image.open(io.BytesIO(data))
        frames = getattr(image, "n_frames", 1)
        image.load()
    except Exception as error:  # Pillow's plugins raise whatever they stumble on
        raise _BadPicture(_why(data, error)) from None
    rules = [f"first of {frames} frames"] if frames > 1 else []
    rules += _named_otherwise(sample.name, image.format)
    upright = ImageOps.exif_transpose(image)
    rules += ["turned upright"] if upright.size != image.size or _turn(image) != 1 else []
    rgb, rule = _rgb(upright)
    rules += [rule] if rule else []
    if isinstance(image, JpegImagePlugin.JpegImageFile) and image.mode == "RGB" and not _known_sampling(image):
        rules.append("odd chroma sampling")
    elif image.format == "JPEG" and frame is None:
        rules.append("odd JPEG")
    picture = shrink(rgb, settings)
    if settings.raw:
        return Encoded(sample.name, sample.label, RAW, *picture.size, picture.tobytes(), ", ".join(rules))
    body = _jpeg(picture, settings)
    segments = segment_table(body) if settings.restart_markers else b""
    return Encoded(sample.name, sample.label, JPEG, *picture.size, body, ", ".join(rules), segments)


def _upright(frame: Frame, data: bytes) -> bool:
    """Whether the frame is all there is to a picture that every reader decodes alike."""
    if min(frame.width, frame.height) == 0 or not frame.common:
        return False
    if not frame.remarks:
        return True
    image = Image.open(io.BytesIO(data))
    return image.format == "JPEG" and _turn(image) == 1  # not MPO, which holds several pictures


def _coded_again(data: bytes, frame: Frame, settings: PrepSettings) -> tuple[bytes, bytes, str]:
    """The same pixels, as (bytes, table of segments, rule)."""
    return with_markers(data, frame) if settings.restart_markers else (data, b"", "")


def _turn(image: Image.Image) -> int:
    return image.getexif().get(ORIENTATION, 1)


def _known_sampling(image: JpegImagePlugin.JpegImageFile) -> bool:
    first, *others = ((h, v) for _, h, v, _ in image.layer)
    return first in SAMPLINGS and all(other == (1, 1) for other in others)


def _named_otherwise(name: str, format: str | None) -> list[str]:
    expected = _format_named("." + name.rpartition(".")[2].lower())
    found = "JPEG" if format == "MPO" else format
    return [f"a {found} file"] if expected and expected != found else []


@functools.lru_cache(100)
def _format_named(suffix: str) -> str | None:
    return Image.registered_extensions().get(suffix)


def _rgb(image: Image.Image) -> tuple[Image.Image, str]:
    """The picture in RGB, and the rule where its mode was another."""
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image, ""
    if mode.startswith("I"):
        levels = np.clip(np.asarray(image), 0, 65_535) >> 8  # Pillow reads 16-bit RGB so too
        return Image.fromarray(levels.astype(np.uint8)).convert("RGB"), "16-bit grey to RGB, high bytes"
    if image.has_transparency_data:
        clear = image.convert("RGBA")
        white = Image.new("RGBA", clear.size, "white")
        return Image.alpha_composite(white, clear).convert("RGB"), "alpha over white"
    if mode in ("L", "1"):
        return image.convert("RGB"), "grey to RGB"
    if mode in ("P", "CMYK", "YCbCr", "LAB", "HSV"):
        return image.convert("RGB"), f"{'palette' if mode == 'P' else mode} to RGB"
    raise _BadPicture(f"pictures of Pillow's mode {mode} have no rule")


def _jpeg(image: Image.Image, settings: PrepSettings) -> bytes:
    buffer = io.BytesIO()
    if settings.restart_markers:
        interval = interval_for(image.width, across=16)  # Pillow's 4:2:0
        image.save(buffer, "JPEG", quality=settings.quality, restart_marker_blocks=interval)
    else:
        image.save(buffer, "JPEG", quality=settings.quality)
    return buffer.getvalue()


def _why(data: bytes, error: Exception) -> str:
    if not data:
        return "is empty"
    if isinstance(error, Image.UnidentifiedImageError):
        return "is no picture that Pillow can read"
    return f"cannot be decoded ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
