"""The table of a JPEG's restart segments, with which a reader decodes only the segments that a crop touches.

A segment is what lies between two restart markers: MCUs (the blocks of 8 x 8 to 32 x 16 pixels that JPEG codes
together) that can be decoded without any other segment. The field `segments` of a .beton holds these uint32 numbers
for each image:

    MCUs per segment, width of an MCU in pixels, height of an MCU in pixels,
    start of each segment, end of the last one       (bytes from the start of the image's JPEG)

A row of MCUs is a whole number of segments, rows are in order, and each segment except the last ends with the two
bytes of its marker. The table of an image without segments is three zeros.
"""

from typing import NamedTuple

import numpy as np

from widemix.errors import InputError
from widemix.formats.beton import Beton

NUMBER = np.dtype("<u4")
HEAD = 3  # numbers before the offsets
NO_SEGMENTS = bytes(HEAD * NUMBER.itemsize)


class Segments(NamedTuple):
    """The segments of one image."""

    interval: int  # MCUs per segment
    mcu_width: int  # pixels
    mcu_height: int  # pixels
    offsets: np.ndarray  # uint32 [segments + 1], bytes from the start of the JPEG; the last is the end


def segments_of(beton: Beton, sample: int) -> Segments | None:
    """The segments of a sample's JPEG, or None if it has none. Raises `InputError` if the table is not consistent."""
    start, size = int(beton.segments[sample]), int(beton.segments_size[sample])
    numbers = beton.bytes[start : start + size].view(NUMBER)
    if size == 0 or numbers[0] == 0:
        return None
    interval, across, down = (int(number) for number in numbers[:HEAD])
    offsets, length = numbers[HEAD:].astype(np.int64), int(beton.size[sample])
    mcus = -(-int(beton.width[sample]) // max(across, 1)), -(-int(beton.height[sample]) // max(down, 1))
    if (
        mcus[0] % interval
        or len(offsets) != mcus[0] // interval * mcus[1] + 1
        or (np.diff(offsets) < 1).any()
        or not 0 < offsets[0] <= offsets[-1] <= length
    ):
        raise InputError(f"{beton.path}: the segments of sample {sample} are damaged; prepare the folder again")
    return Segments(interval, across, down, numbers[HEAD:])
