"""The checksums of samples, in a file next to each .beton: `train.crc32c` for `train.beton`.

FFCV's format has none, and JPEG decoders accept most damage. A sample's checksum is computed from its bytes before
they are written, and compared at every read. It is the CRC-32C (RFC 3720, B.4) of these numbers, little-endian:

    the sample's record, int64 each:    images: mode, width, height, label, bytes of the image, bytes of `segments`;
                                        in a file of targets the CRC-32C of the sample's instead of its label
                                        text: length, second, label, bytes of the tokens
    the CRC-32C of each chunk, uint32:  images as JPEG: of the image, of `segments` (0 if there is none)
                                        images as pixels: of each band of whole rows, at least `BAND` bytes
                                        text: of the tokens

The file holds the checksums of all samples, uint32, and then the chunks' of those that are pixels: a reader of a few
rows reads, and checks, only the bands that hold them.
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from widemix.errors import InputError
from widemix.files import open_regular
from widemix.formats.beton import RAW, TARGET, Beton
from widemix.formats.text import TOKEN, TextBeton
from widemix.native import BuildError
from widemix.native.library import open_library

SUFFIX = ".crc32c"
NUMBER = np.dtype("<u4")
BAND = 16_384  # bytes of pixels; more would be read for nothing, fewer would need more checksums
MISMATCH = "its bytes differ from its checksum"


class Checksums(NamedTuple):
    """The checksums of a file of n samples."""

    samples: np.ndarray  # uint32 [n]
    bands: np.ndarray  # uint32 [all bands], of the samples that are pixels
    first: np.ndarray  # int64 [n]: the index in `bands` of each sample's first


def open_checksums(beton: Beton | TextBeton) -> Checksums:
    """Read the checksums next to a .beton into memory. Raises `InputError` unless there are as many as it needs."""
    path, counts = beton.path.with_suffix(SUFFIX), band_counts(beton)
    first = counts if not counts.any() else np.cumsum(counts) - counts
    bands = int(first[-1] + counts[-1]) if len(beton) else 0
    try:
        with open_regular(path) as file:
            numbers = np.fromfile(file, NUMBER)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); prepare the folder again") from None
    size, wanted = path.stat().st_size, (len(beton) + bands) * NUMBER.itemsize
    if size != wanted:
        raise InputError(f"{path}: has {size} bytes, and the samples need {wanted}; prepare the folder again")
    return Checksums(numbers[: len(beton)], numbers[len(beton) :], first)


def band_counts(beton: Beton | TextBeton) -> np.ndarray:
    """The bands of each sample: int64 [n], 0 for those that are not pixels."""
    if isinstance(beton, TextBeton) or not (beton.mode == RAW).any():
        return np.broadcast_to(np.int64(0), len(beton))
    return np.where(beton.mode == RAW, -(-beton.height // band_rows(beton.width)), 0)


def band_rows(width: Any) -> Any:
    """The rows of a band of an image, of `width` pixels (int or int array)."""
    return -(-BAND // (3 * width))


def image_chunks(mode: int, width: int, data: bytes, segments: bytes) -> list[int]:
    """Return the CRC-32C of each chunk of an image: its bytes `data`, and its table of segments."""
    if mode == RAW:
        return crc32c_bands(np.frombuffer(data, np.uint8), band_rows(width) * 3 * width).tolist()
    return [crc32c(data), crc32c(segments)]


def sample_checksum(record: Sequence[int], chunks: Sequence[int]) -> int:
    """The checksum of a sample from its record and the CRC-32C of each of its chunks."""
    return crc32c(struct.pack(f"<{len(record)}q{len(chunks)}I", *record, *chunks))


def compute_checksums(beton: Beton | TextBeton, samples: np.ndarray, data: bytes, start: int) -> np.ndarray:
    """The checksums of samples, int [B], from the bytes of the file from byte `start` on: uint32 [B]."""
    offsets = (beton.offset[samples] - start).tolist()
    if isinstance(beton, TextBeton):
        size = beton.tokens * TOKEN.itemsize
        joined = b"".join(data[offset : offset + size] for offset in offsets)
        return text_checksums(beton, samples, np.frombuffer(joined, TOKEN).reshape(-1, beton.tokens))
    checksums = np.empty(len(samples), NUMBER)
    tables = (beton.segments[samples] - start).tolist()
    for number, (sample, offset, table) in enumerate(zip(samples, offsets, tables, strict=True)):
        size, table_size = int(beton.size[sample]), int(beton.segments_size[sample])
        mode, width = int(beton.mode[sample]), int(beton.width[sample])
        label, place = int(beton.label[sample]), int(beton.targets[sample]) - start
        if beton.target_count:
            label = crc32c(data[place : place + beton.target_count * TARGET.itemsize])
        record = mode, width, int(beton.height[sample]), label, size, table_size
        parts = data[offset : offset + size], data[table : table + table_size] if table_size else b""
        checksums[number] = sample_checksum(record, image_chunks(mode, width, *parts))
    return checksums


def text_checksums(file: TextBeton, samples: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The checksums that samples of a file, int [B], should have with these tokens, int32 [B, tokens]: uint32 [B]."""
    numbers = np.empty(len(samples), [("record", "<i8", 4), ("chunk", NUMBER)])
    columns = (file.length[samples], file.second[samples], file.label[samples], file.size[samples])
    numbers["record"] = np.stack(columns, axis=1)
    numbers["chunk"] = crc32c_bands(tokens.view(np.uint8).reshape(-1), tokens.shape[1] * tokens.itemsize)
    return crc32c_bands(numbers.view(np.uint8), numbers.itemsize)


def crc32c(data: bytes) -> int:
    """The CRC-32C of the data."""
    return _functions()[0](data)


def crc32c_bands(data: np.ndarray, band: int) -> np.ndarray:
    """The CRC-32C of every `band` bytes of the data, uint8 [size], of which the last may be fewer: uint32 [bands]."""
    assert data.flags.c_contiguous  # C gets addresses, not strides
    checksums = np.empty(-(-len(data) // band), NUMBER)
    _functions()[1](data, band, checksums)
    return checksums


@functools.cache
def _functions() -> tuple[Callable[[bytes], int], Callable[[np.ndarray, int, np.ndarray], None]]:
    """`crc32c`, and a function that writes the checksums of bands: in C, by numba where that cannot be built."""
    try:
        library = open_library()
    except BuildError:
        bands = _with_numba()
        return lambda data: _first(bands, data), bands
    library.crc32c.argtypes = [ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t]
    library.crc32c.restype = ctypes.c_uint32
    library.crc32c_bands.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    library.crc32c_bands.restype = None

    def compute(data: np.ndarray, band: int, checksums: np.ndarray) -> None:
        library.crc32c_bands(data.ctypes.data, len(data), band, checksums.ctypes.data)

    return lambda data: library.crc32c(0, data, len(data)), compute


def _first(bands: Callable[[np.ndarray, int, np.ndarray], None], data: bytes) -> int:
    checksum = np.zeros(1, NUMBER)  # that of no data
    if data:
        bands(np.frombuffer(data, np.uint8), len(data), checksum)
    return int(checksum[0])


def _with_numba() -> Callable[[np.ndarray, int, np.ndarray], None]:
    import numba

    table: np.ndarray = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ (table & 1) * np.uint32(0x82F63B78)

    @numba.njit(nogil=True)
    def compute(data, band, checksums):
        for number in range(len(checksums)):
            crc = np.uint32(0xFFFFFFFF)
            for byte in data[number * band : (number + 1) * band]:
                crc = (crc >> np.uint32(8)) ^ table[(crc ^ byte) & 255]
            checksums[number] = ~crc

    return compute
