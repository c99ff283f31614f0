"""Restart markers: JPEGs rewritten without loss, so that a reader decodes only the segments that a crop touches."""

import ctypes
import functools
import re
from collections.abc import Callable
from math import ceil

import numpy as np

from widemix.data_prep.jpeg import Frame, plain_frame
from widemix.formats.segments import NO_SEGMENTS, NUMBER
from widemix.native import BuildError
from widemix.native.library import open_library
from widemix.tally import print_status

MIN_SEGMENT_WIDTH = 48  # pixels; a segment costs 2 to 3 bytes, and restarts the DC prediction
MARKER = re.compile(rb"\xff[\xd0-\xd7]")
WRITTEN, WARNED, FAILED, TOO_LARGE, NOT_TAKEN = range(5)  # results of restart.c and shrink.c
MAX_GROWTH = 65_536  # bytes by which a JPEG may grow, in addition to a quarter


def interval_for(width: int, across: int) -> int:
    """MCUs between restart markers, for an image `width` pixels wide with MCUs of `across` pixels.

    The smallest divisor of a row's MCUs that spans at least 48 pixels.
    """
    row = ceil(width / across)
    return next((part for part in range(ceil(MIN_SEGMENT_WIDTH / across), row) if row % part == 0), row)


class DamagedJpeg(Exception):
    """The entropy-coded data are cut short, or cannot be read."""


def check_jpeg(data: bytes) -> str:
    """libjpeg's warning of a JPEG of any kind, or ""; also without a compiled library. Raises `DamagedJpeg`."""
    compiled, text = library(), ctypes.create_string_buffer(200)
    if compiled is None:
        return ""
    outcome = compiled.check_jpeg(data, ctypes.c_int64(len(data)), text)
    message = text.value.decode("ascii", "replace")
    _refuse_damage(outcome, message)
    return message


def _refuse_damage(outcome: int, message: str) -> None:
    if outcome == FAILED or "remature end" in message:
        raise DamagedJpeg(message)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library, or None if it cannot be built; a note is then printed, once per process."""
    try:
        return open_library()
    except BuildError as error:
        print_status(
            "note: JPEGs, if there are any, are stored as they are, without restart markers, some damaged ones too: "
            f"{error}"
        )
        return None


def with_markers(data: bytes, frame: Frame) -> tuple[bytes, bytes, str] | None:
    """Add restart markers and optimised Huffman tables to a JPEG: (bytes, table of segments, rule).

    The pixels do not change; comments and metadata are dropped. Where libjpeg warns of the JPEG, what libjpeg makes
    of it is written, which reads without a warning, and the rule says why. The JPEG is returned unchanged, with a
    rule, if it is progressive or would grow too much; and without a rule if there is no compiled library. None if
    libjpeg warns of a progressive one that lacks scans. Raises `DamagedJpeg`.
    """
    compiled = library()
    if compiled is None:
        return data, NO_SEGMENTS, ""
    outcome, rewritten, message = call_codec(compiled.restart_jpeg, data, interval_for(frame.width, frame.mcu[0]))
    if outcome == WRITTEN and not frame.progressive:
        return rewritten, segment_table(rewritten), ""
    if rewritten and outcome == WARNED:
        return rewritten, segment_table(rewritten), f"repaired: {message}"
    if outcome == NOT_TAKEN and message:
        return None
    why = "progressive" if outcome in (WRITTEN, NOT_TAKEN) else message or "grows by a quarter"
    return data, NO_SEGMENTS, f"kept as it is: {why}"


def call_codec(function: Callable[..., int], data: bytes, *settings: int) -> tuple[int, bytes, str]:
    """Call `restart_jpeg` or `shrink_jpeg` of the compiled library: (result, bytes, libjpeg's message).

    Raises `DamagedJpeg`.
    """
    outcome, output, size, message = run_codec(function, data, len(data) * 5 // 4 + MAX_GROWTH, *settings)
    _refuse_damage(outcome, message)
    fits = outcome in (WRITTEN, WARNED) and size <= len(output)
    return outcome, output[:size].tobytes() if fits else b"", message


def run_codec(
    function: Callable[..., int], data: bytes, room: int, *settings: int
) -> tuple[int, np.ndarray, int, str]:
    """Call a function of the compiled library that writes at most `room` bytes: result, bytes, their count, message.

    The count may be more than the room.
    """
    output = np.empty(room, np.uint8)
    size, text = ctypes.c_int64(), ctypes.create_string_buffer(200)
    outcome = function(
        data,
        ctypes.c_int64(len(data)),
        *settings,
        ctypes.c_void_p(output.ctypes.data),
        ctypes.c_int64(len(output)),
        ctypes.byref(size),
        text,
    )
    return outcome, output, size.value, text.value.decode("ascii", "replace")


def segment_table(data: bytes) -> bytes:
    """The table of a JPEG written here, in colour and one scan; `NO_SEGMENTS` unless each interval has its marker."""
    frame = plain_frame(data)
    assert frame is not None
    across, down = frame.mcu
    interval = interval_for(frame.width, across)
    starts = [frame.scan, *(match.end() for match in MARKER.finditer(data, frame.scan))]
    if len(starts) != ceil(frame.width / across) // interval * ceil(frame.height / down):
        return NO_SEGMENTS
    end = data.rindex(b"\xff\xd9")
    return np.array([interval, across, down, *starts, end], NUMBER).tobytes()
