"""Numeric arrays of a MATLAB 5 .mat file, decompressed to a temporary file, so that memory stays small.

Format: MathWorks, "MAT-File Format". Every element is a tag (type, bytes) and its data, padded to 8 bytes; data of up
to 4 bytes fit into the tag. A matrix is an element that holds elements: flags, dimensions, name, values.
"""

import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pipeline.errors import InputError

HEADER = 128  # bytes
TYPES = {1: "<i1", 2: "<u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
MATRIX, COMPRESSED = 14, 15
PIECE = 1 << 20  # bytes decompressed at a time

Read = Callable[[int], bytes]  # the next n bytes, or EOFError


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Every array by name, with axes reversed: MATLAB's first index, which runs fastest, comes last."""
    arrays: dict[str, np.ndarray] = {}
    try:
        with path.open("rb") as file:
            head = file.read(HEADER)
            if head[:6] != b"MATLAB" or head[124:128] != b"\x00\x01IM":
                raise InputError(f"{path}: is no little-endian MATLAB 5 file")
            while tag := file.read(8):
                kind, size = np.frombuffer(tag, "<u4").tolist()
                end = file.tell() + size
                read = _inflating(file, size) if kind == COMPRESSED else _exactly(file)
                if kind == COMPRESSED:
                    kind = int.from_bytes(read(8)[:4], "little")
                if kind == MATRIX:
                    name, array = _matrix(read)
                    arrays[name] = array
                file.seek(end)
    except (OSError, EOFError, KeyError, ValueError, zlib.error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: cannot be read, or is cut short ({error!r}); fetch it again") from None
    return arrays


def _matrix(read: Read) -> tuple[str, np.ndarray]:
    _flags, shape, name = (_small(read) for _ in range(3))
    kind, size, in_tag = _tag(read)
    dims = tuple(np.frombuffer(shape, "<i4").tolist())
    with tempfile.TemporaryFile() as values:  # the map keeps the file alive
        for start in range(0, size, PIECE):
            values.write(in_tag[:size] if in_tag else read(min(PIECE, size - start)))
        values.flush()
        return name.decode("ascii"), np.memmap(values, TYPES[kind], "r", shape=dims[::-1])


def _tag(read: Read) -> tuple[int, int, bytes]:
    """Type, bytes, and the data where the tag holds them."""
    tag = read(8)
    kind, size = int.from_bytes(tag[:4], "little"), int.from_bytes(tag[4:], "little")
    return (kind & 0xFFFF, kind >> 16, tag[4:]) if kind >> 16 else (kind, size, b"")


def _small(read: Read) -> bytes:
    _, size, in_tag = _tag(read)
    return in_tag[:size] if in_tag else read(-(-size // 8) * 8)[:size]


def _exactly(file: BinaryIO) -> Read:
    def read(count: int) -> bytes:
        data = file.read(count)
        if len(data) < count:
            raise EOFError
        return data

    return read


def _inflating(file: BinaryIO, size: int) -> Read:
    inflater, left, ready = zlib.decompressobj(), size, b""

    def read(count: int) -> bytes:
        nonlocal left, ready
        while len(ready) < count:
            packed = inflater.unconsumed_tail or file.read(min(PIECE, left))
            left -= 0 if inflater.unconsumed_tail else len(packed)
            piece = inflater.decompress(packed, PIECE)
            if not piece and not packed:
                raise EOFError
            ready += piece
        data, ready = ready[:count], ready[count:]
        return data

    return read
