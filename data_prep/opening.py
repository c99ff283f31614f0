"""Opens and decodes images with Pillow, with a limit of pixels of each call: Pillow's own is one for the process."""

import io
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from PIL import Image, TiffImagePlugin

Size = tuple[int, int]  # width and height, pixels

_LIMIT = threading.Lock()

BITS, PHOTOMETRIC, CHANNELS, EXTRA = 258, 262, 277, 338  # tags of TIFF
COLOURS = {0: 1, 1: 1, 2: 3, 3: 1, 5: 4, 6: 3, 8: 3}  # channels of each photometric interpretation, without alpha
TIFFS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
J2K = b"\xff\x4f\xff\x51"  # what the codestream of JPEG 2000 begins with
PNM = re.compile(rb"P[2356]" + 3 * rb"(?:\s|#[^\r\n]*)+(\d+)")  # width, height and the largest level


class CorruptImage(Exception):
    """The message says what is wrong with the image."""


@contextmanager
def _without_pillows_limit() -> Iterator[None]:
    with _LIMIT:
        before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = before


def open_image(data: bytes) -> Image.Image:
    """The image in a file's bytes, of any size; not decoded yet."""
    with _without_pillows_limit():
        return Image.open(io.BytesIO(data))


def load_image(image: Image.Image, stored: Size, max_pixels: int) -> int:
    """Decode an image of at most `max_pixels`, of several frames the first; returns how many there are.

    A larger JPEG is scaled down by its inverse DCT, if at least twice the `stored` size remains and that has no more
    pixels. Raises `CorruptImage` for other images with more.
    """
    pixels = image.width * image.height
    scaled = decoded_pixels(image.size, stored, "progressive" in image.info)
    if pixels > max_pixels >= scaled and image.format in ("JPEG", "MPO"):
        image.draft(None, (2 * stored[0], 2 * stored[1]))
        pixels = scaled
    if pixels > max_pixels:
        raise CorruptImage(f"has {pixels:,} pixels, more than max_pixels {max_pixels:,}, which can be set higher")
    is_huge = Image.MAX_IMAGE_PIXELS is not None and pixels > Image.MAX_IMAGE_PIXELS
    with _without_pillows_limit() if is_huge else nullcontext():  # one at a time, which bounds memory too
        frames = getattr(image, "n_frames", 1)
        image.load()
    return frames


def decoded_pixels(size: Size, stored: Size, progressive: bool) -> int:
    """Pixels that are held to decode a JPEG, of which at least twice the `stored` size is needed.

    All of a progressive JPEG's coefficients are held.
    """
    factor = 1
    while (
        factor < 8
        and not progressive
        and all(side >= 4 * factor * kept for side, kept in zip(size, stored, strict=True))
    ):
        factor *= 2
    return -(-size[0] // factor) * -(-size[1] // factor)


def more_than_rgb(data: bytes) -> str:
    """Return what 8-bit RGB cannot hold of an image file: "16 bits per level", "5 channels"; "" for most.

    By the headers of PNG, TIFF, PGM and PPM, JPEG 2000 and AVIF, which may have more: Pillow makes 8-bit RGB of most
    without a warning. An alpha channel is none of these channels.
    """
    bits, channels = 8, 0
    if data.startswith(b"\x89PNG"):
        bits = data[24]
    elif data.startswith(TIFFS):
        tags = TiffImagePlugin.ImageFileDirectory_v2(data[: 16 if data[2] == 43 else 8])  # as Pillow reads BigTIFF
        file = io.BytesIO(data)
        file.seek(tags.next)
        tags.load(file)
        there = tags.get(CHANNELS, 1)
        kept = COLOURS.get(tags.get(PHOTOMETRIC, 0), 3)
        kept += any(tags.get(EXTRA, ())) or (EXTRA not in tags and kept == 3)  # 0 is a channel of no stated meaning
        bits, channels = max(tags.get(BITS, (8,))), there if there > kept else 0
    elif match := PNM.match(data):
        bits = int(match[3]).bit_length()
    elif data.startswith((J2K, b"\0\0\0\x0cjP")):
        start = data.find(J2K)
        count = int.from_bytes(data[start + 40 : start + 42])
        bits = max(1 + (depth & 127) for depth in data[start + 42 : start + 42 + 3 * count : 3])
    elif data[4:8] == b"ftyp" and (start := data.find(b"av1C")) >= 0:
        bits = 8 + 2 * (data[start + 6] >> 6 & 1) + 2 * (data[start + 6] >> 5 & 1)
    return " and ".join(
        ([f"{channels} channels"] if channels else []) + ([f"{bits} bits per level"] if bits > 8 else [])
    )
