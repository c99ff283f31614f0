"""Images shrunk with the Lanczos filter: JPEGs plane by plane in compiled code, all others by Pillow.

The luma and chroma planes of a JPEG are resized as they are stored and encoded again, without conversion to RGB and
back. A much larger JPEG is first scaled down by its inverse DCT. The result is closer to the original than Pillow's.
"""

from widemix.data_prep.jpeg import Frame
from widemix.data_prep.opening import decoded_pixels
from widemix.data_prep.restart import WARNED, WRITTEN, call_codec, interval_for, library, segment_table
from widemix.data_prep.settings import PrepSettings


def shrunk_size(size: tuple[int, int], settings: PrepSettings) -> tuple[int, int]:
    """The (width, height) to store, in pixels: the side that the settings name is at most `max_size`."""
    measured = max(size) if settings.side == "longest" else min(size)
    if settings.max_size == 0 or measured <= settings.max_size:
        return size
    width, height = (max(1, round(pixels * settings.max_size / measured)) for pixels in size)
    return width, height


def shrink_jpeg(data: bytes, frame: Frame, settings: PrepSettings) -> tuple[bytes, bytes, str] | None:
    """A JPEG of common sampling re-encoded at its `shrunk_size`: (bytes, table of segments, rule).

    The rule is libjpeg's warning, if there was one. None if the JPEG is not YCbCr, lacks scans, more than
    `max_pixels` of it would be held, or there is no compiled library. Raises `DamagedJpeg`.
    """
    compiled, whole = library(), (frame.width, frame.height)
    size = shrunk_size(whole, settings)
    if compiled is None or decoded_pixels(whole, size, frame.progressive) > settings.max_pixels:
        return None
    interval = interval_for(size[0], across=16) if settings.segments else 0
    outcome, encoded, warning = call_codec(compiled.shrink_jpeg, data, *size, settings.quality, interval)
    if outcome not in (WRITTEN, WARNED):
        return None
    return encoded, segment_table(encoded) if settings.segments else b"", warning
