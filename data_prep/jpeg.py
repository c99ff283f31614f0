"""JPEGs by their markers (ITU-T T.81, annex B), and what the compiled code makes of them without RGB.

With restart markers a reader decodes only the segments that a crop touches. Shrunk, the luma and chroma planes are
resized as they are stored with the Lanczos filter, and encoded again; a much larger JPEG is first scaled down by its
inverse DCT. The result is closer to the original than Pillow's. Coefficients: see pipeline/formats/coefficients.py.
"""

import ctypes
import functools
import re
from collections.abc import Callable
from math import ceil
from typing import NamedTuple

import numpy as np

from widemix.data_prep.opening import decoded_pixels
from widemix.data_prep.settings import PrepSettings
from widemix.formats import coefficients
from widemix.formats.beton import NO_SEGMENTS, SEGMENT_NUMBER
from widemix.native import BuildError
from widemix.native.library import open_library
from widemix.progress_line import print_status

SOI, EOI = b"\xff\xd8", b"\xff\xd9"
BASELINE, EXTENDED, PROGRESSIVE = 0xC0, 0xC1, 0xC2  # Huffman-coded frames that every decoder reads
OTHER_FRAMES = set(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}  # lossless, hierarchical, arithmetic
HUFFMAN_TABLE, SCAN = 0xC4, 0xDA
METADATA = {
    0xE1: (b"Exif\0", b"http://ns.adobe.com/xap"),
    0xE2: (b"MPF\0",),
}  # may hold an orientation, or further images
# Sampling factors of the first component that libturbojpeg supports: 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1.
SAMPLINGS = {(1, 1), (2, 1), (2, 2), (1, 2), (4, 1)}
MIN_SEGMENT_WIDTH = 48  # pixels; a segment costs 2 to 3 bytes, and restarts the DC prediction
MARKER = re.compile(rb"\xff[\xd0-\xd7]")
WRITTEN, WARNED, FAILED, TOO_LARGE, NOT_TAKEN = range(5)  # results of restart.c and shrink.c
MAX_GROWTH = 65_536  # bytes by which a JPEG may grow, in addition to a quarter


class Frame(NamedTuple):
    """The only frame of a JPEG: 8 bits, Huffman-coded, with its tables before it and an end marker after it."""

    width: int  # pixels
    height: int  # pixels
    progressive: bool
    sampling: tuple[tuple[int, int], ...]  # factors (across, down) of each component
    has_metadata: bool  # whether there are EXIF, XMP or MPF segments
    scan: int  # bytes before the entropy-coded data of the first scan

    @property
    def mcu(self) -> tuple[int, int]:
        """Pixels (across, down) of one MCU."""
        return 8 * max(across for across, _ in self.sampling), 8 * max(down for _, down in self.sampling)

    @property
    def grey(self) -> bool:
        """Whether it has one component."""
        return len(self.sampling) == 1

    @property
    def common_sampling(self) -> bool:
        """Whether it has three components with sampling factors that every decoder supports."""
        return len(self.sampling) == 3 and self.sampling[0] in SAMPLINGS and self.sampling[1:] == ((1, 1), (1, 1))


def plain_frame(data: bytes) -> Frame | None:
    """The frame of a JPEG that has exactly one, of the kind that `Frame` describes; None for all others.

    After the end marker only padding is allowed.
    """
    if not data.startswith(SOI) or not data[-64:].rstrip(b"\0\r\n ").endswith(EOI):
        return None
    position, start, has_tables, has_metadata = len(SOI), 0, False, False
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker, length = data[position + 1], int.from_bytes(data[position + 2 : position + 4])
        if marker == 0xFF:  # fill
            position += 1
            continue
        if marker == SCAN:
            return _frame(data, start, has_metadata, position + 2 + length) if start and has_tables else None
        if marker in (BASELINE, EXTENDED, PROGRESSIVE):
            if start or data[position + 4] != 8:
                return None
            start = position
        elif marker in OTHER_FRAMES:
            return None
        has_tables |= marker == HUFFMAN_TABLE
        has_metadata |= data.startswith(METADATA.get(marker, ()), position + 4)
        position += 2 + length
    return None


def _frame(data: bytes, start: int, has_metadata: bool, scan: int) -> Frame:
    height, width, components = (int.from_bytes(data[start + a : start + b]) for a, b in ((5, 7), (7, 9), (9, 10)))
    layers = data[start + 11 : start + 10 + 3 * components : 3]
    sampling = tuple((s >> 4, s & 15) for s in layers)
    return Frame(width, height, data[start + 1] == PROGRESSIVE, sampling, has_metadata, scan)


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
    return np.array([interval, across, down, *starts, end], SEGMENT_NUMBER).tobytes()


def shrink_jpeg(data: bytes, frame: Frame, settings: PrepSettings) -> tuple[bytes, bytes, str] | None:
    """A JPEG of common sampling re-encoded at the size that the settings give it: (bytes, table of segments, rule).

    The rule is libjpeg's warning, if there was one. None if the JPEG is not YCbCr, lacks scans, more than
    `max_pixels` of it would be held, or there is no compiled library. Raises `DamagedJpeg`.
    """
    compiled, whole = library(), (frame.width, frame.height)
    size = settings.shrunk_size(whole)
    if compiled is None or decoded_pixels(whole, size, frame.progressive) > settings.max_pixels:
        return None
    interval = interval_for(size[0], across=16) if settings.segments else 0
    outcome, encoded, warning = call_codec(compiled.shrink_jpeg, data, *size, settings.quality, interval)
    if outcome not in (WRITTEN, WARNED):
        return None
    return encoded, segment_table(encoded) if settings.segments else b"", warning


def pack(data: bytes) -> tuple[bytes, str]:
    """The coefficients of a JPEG, or none and why the JPEG could not be restored from them."""
    compiled = library()
    assert compiled is not None  # `encoding_for` has asked for it
    try:
        outcome, packed, message = call_codec(compiled.pack_jpeg, data)
    except DamagedJpeg as error:
        return b"", str(error)
    return (packed, "") if outcome == WRITTEN else (b"", message)


def unpack(packed: bytes) -> bytes:
    """The JPEG, byte for byte. Raises `ValueError` for damaged coefficients."""
    compiled = library()
    if compiled is None:
        return coefficients.restore(packed)
    if len(packed) < coefficients.HEAD.size:
        raise ValueError(coefficients.DAMAGED)
    outcome, output, size, message = run_codec(compiled.restore_jpeg, packed, coefficients.jpeg_size(packed))
    if outcome != WRITTEN:
        raise ValueError(message or "out of memory")
    return output[:size].tobytes()
