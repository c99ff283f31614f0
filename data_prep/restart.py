"""Restart markers: JPEGs written anew, losslessly, so that a reader decodes only the segments that a crop touches."""

import ctypes
import functools
import re
from collections.abc import Callable
from math import ceil

import numpy as np

from data_prep.jpeg import Frame, plain_frame
from data_prep.progress import say
from pipeline.formats.segments import NO_SEGMENTS, NUMBER
from pipeline.native import BuildError
from pipeline.native.library import open_library

NARROWEST = 48  # pixels across a segment, which costs 2 to 3 bytes and has its DC prediction start anew
MARKER = re.compile(rb"\xff[\xd0-\xd7]")


WRITTEN, WARNED, FAILED, TOO_LARGE, OTHER_COLOURS = range(5)  # what restart.c and shrink.c return
ROOM = 65_536  # bytes that a JPEG may grow by, besides a quarter


def interval_for(width: int, across: int) -> int:
    """MCUs between restart markers, each `across` pixels: the least divisor of a row that spans 48 pixels or more."""
    row = ceil(width / across)
    return next((part for part in range(ceil(NARROWEST / across), row) if row % part == 0), row)


class DamagedJpeg(Exception):
    """The entropy-coded data end before the picture does, or cannot be read."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled part, or None where it cannot be had, which is said once in each process that asks."""
    try:
        return open_library()
    except BuildError as error:
        say(f"note: JPEGs are stored as they are, without restart markers: {error}")
        return None


def with_markers(data: bytes, frame: Frame) -> tuple[bytes, bytes, str]:
    """A plain JPEG with restart markers and Huffman tables of its own: (bytes, table of segments, rule).

    Pixels stay what they are; comments and metadata go. A progressive one, and one of which libjpeg warns, is kept
    as it is, by a rule; so is any, without a rule, where there is no compiled library. Raises `DamagedJpeg`.
    """
    compiled = library()
    if compiled is None:
        return data, NO_SEGMENTS, ""
    outcome, anew, words = rewritten(compiled.restart_jpeg, data, interval_for(frame.width, frame.mcu[0]))
    if outcome == WRITTEN and not frame.progressive:
        return anew, segment_table(anew), ""
    why = "progressive" if outcome == WRITTEN else words or "grows by a quarter"
    return data, NO_SEGMENTS, f"kept as it is: {why}"


def rewritten(function: Callable[..., int], data: bytes, *settings: int) -> tuple[int, bytes, str]:
    """What a compiled function makes of a JPEG: (outcome, bytes, libjpeg's words). Raises `DamagedJpeg`."""
    written = np.empty(len(data) * 5 // 4 + ROOM, np.uint8)
    size, text = ctypes.c_int64(), ctypes.create_string_buffer(200)
    outcome = function(
        data,
        ctypes.c_int64(len(data)),
        *settings,
        ctypes.c_void_p(written.ctypes.data),
        ctypes.c_int64(len(written)),
        ctypes.byref(size),
        text,
    )
    words = text.value.decode("ascii", "replace")
    if outcome == FAILED or "remature end" in words:
        raise DamagedJpeg(words)
    fits = outcome in (WRITTEN, WARNED) and size.value <= len(written)
    return outcome, written[: size.value].tobytes() if fits else b"", words


def segment_table(data: bytes) -> bytes:
    """The table of a baseline JPEG with restart markers at the interval of its frame, or `NO_SEGMENTS`."""
    frame = plain_frame(data)
    if frame is None or frame.progressive or not frame.common:
        return NO_SEGMENTS
    across, down = frame.mcu
    interval = interval_for(frame.width, across)
    begins = [frame.scan, *(match.end() for match in MARKER.finditer(data, frame.scan))]
    if len(begins) != ceil(frame.width / across) // interval * ceil(frame.height / down):
        return NO_SEGMENTS
    end = data.rindex(b"\xff\xd9")
    return np.array([interval, across, down, *begins, end], NUMBER).tobytes()
