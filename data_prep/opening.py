"""Opens and decodes images with Pillow, with a limit of pixels of each call: Pillow's own is one for the process."""

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from PIL import Image

Size = tuple[int, int]  # width and height, pixels

_LIMIT = threading.Lock()


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
