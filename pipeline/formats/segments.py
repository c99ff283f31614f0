"""The table of a JPEG's restart segments, which lets a reader decode only those which a crop touches.

Between two restart markers lies a segment: some MCUs (the blocks of 8 x 8 to 32 x 16 pixels that JPEG codes together)
whose coding depends on no other segment. The field `segments` of a .beton holds, for each picture, uint32 numbers:

    MCUs in a segment, pixels across an MCU, pixels down an MCU,
    where each segment begins, where the last one ends       (bytes from the start of the picture's JPEG)

The segments of a row of MCUs fill it exactly, rows follow each other, and each segment but the last ends in the two
bytes of its marker. Three zeros stand for a picture without such segments.
"""

from typing import NamedTuple

import numpy as np

from pipeline.errors import InputError
from pipeline.formats.beton import Beton

NUMBER = np.dtype("<u4")
HEAD = 3  # numbers before the places
NO_SEGMENTS = bytes(HEAD * NUMBER.itemsize)


class Segments(NamedTuple):
    """Where the segments of one picture lie in its JPEG."""

    interval: int  # MCUs in a segment
    mcu_width: int  # pixels
    mcu_height: int  # pixels
    places: np.ndarray  # uint32 [segments + 1], bytes; the last is the end


def segments_of(beton: Beton, sample: int) -> Segments | None:
    """The segments of a sample's JPEG; None where it has none. `InputError` where the table cannot be right."""
    start, size = int(beton.segments[sample]), int(beton.segments_size[sample])
    numbers = beton.bytes[start : start + size].view(NUMBER)
    if size == 0 or numbers[0] == 0:
        return None
    interval, across, down = (int(number) for number in numbers[:HEAD])
    places, length = numbers[HEAD:].astype(np.int64), int(beton.size[sample])
    mcus = -(-int(beton.width[sample]) // max(across, 1)), -(-int(beton.height[sample]) // max(down, 1))
    if (
        mcus[0] % interval
        or len(places) != mcus[0] // interval * mcus[1] + 1
        or (np.diff(places) < 1).any()
        or not 0 < places[0] <= places[-1] <= length
    ):
        raise InputError(f"{beton.path}: the segments of sample {sample} are damaged; prepare the folder again")
    return Segments(interval, across, down, numbers[HEAD:])
