"""Pictures made smaller with the Lanczos filter: JPEGs plane by plane in compiled code, all others by Pillow.

A JPEG's planes of brightness and colour are resized as they are coded and coded again, without the way to RGB and
back; one far larger is first brought near by its inverse transform. Both stay closer to the original than Pillow's.
"""

from PIL import Image

from data_prep.jpeg import Frame
from data_prep.restart import WARNED, WRITTEN, interval_for, library, rewritten, segment_table
from data_prep.settings import PrepSettings


def shrunk(size: tuple[int, int], settings: PrepSettings) -> tuple[int, int]:
    """The size (width, height) to store: the side of the settings at most `max_size` pixels; never enlarged."""
    measured = max(size) if settings.side == "longest" else min(size)
    if settings.max_size == 0 or measured <= settings.max_size:
        return size
    width, height = (max(1, round(pixels * settings.max_size / measured)) for pixels in size)
    return width, height


def shrink(image: Image.Image, settings: PrepSettings) -> Image.Image:
    size = shrunk(image.size, settings)
    return image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)


def shrink_jpeg(data: bytes, frame: Frame, settings: PrepSettings) -> tuple[bytes, bytes, str] | None:
    """A plain JPEG of common sampling at its smaller size: (bytes, table of segments, rule).

    The rule says what libjpeg warns of. None where it is not brightness and two colours or has more pixels than
    Pillow takes unasked, and where there is no compiled library. Raises `DamagedJpeg`.
    """
    compiled = library()
    if compiled is None or frame.width * frame.height > (Image.MAX_IMAGE_PIXELS or 0):
        return None
    size = shrunk((frame.width, frame.height), settings)
    interval = interval_for(size[0], across=16) if settings.restart_markers else 0
    outcome, anew, words = rewritten(compiled.shrink_jpeg, data, *size, settings.quality, interval)
    if outcome not in (WRITTEN, WARNED):
        return None
    return anew, segment_table(anew) if settings.restart_markers else b"", words
