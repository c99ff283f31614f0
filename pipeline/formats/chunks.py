"""Hashes of a file's chunks of 64 MiB. A manifest lists them, so that each chunk can be checked on its own."""

import copy
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from widemix.cgroups import usable_cpus
from widemix.errors import InputError
from widemix.files import open_regular

CHUNK = 64 << 20  # bytes per hash
PIECE = 4 << 20  # bytes read at a time
CACHED = 1 << 20  # bytes that stay in the cache of a core
HASH = 16  # bytes of a hash (BLAKE3-128)


class ChunkHashes:
    """The hashes of a file's chunks, computed from the data before they are written.

    `known` holds, by number, the hash in hex of each chunk that was written in order and only once. `hash_chunks`
    reads the others: all before byte `start`, where the first such chunk begins, and those that were written again.
    """

    def __init__(self) -> None:
        self.known: dict[int, str] = {}
        self.start = 0
        self._begin = 0  # position of the first data
        self._end: int | None = None  # position after the data so far
        self._digest: blake3 | None = None  # of the chunk at `_end`, if its data were added from its first byte on
        self._before = blake3()  # of the data before `start`
        self._all = blake3()  # of the data that were added in order

    def copy(self) -> "ChunkHashes":
        """A copy that can be continued on its own."""
        copied = copy.copy(self)
        copied.known = dict(self.known)
        copied._before, copied._all = self._before.copy(), self._all.copy()
        copied._digest = self._digest.copy() if self._digest else None
        return copied

    def all(self) -> str:
        """The hash of all data that were added in order, in hex."""
        return self._all.hexdigest(length=HASH)

    def add_file(self, file: BinaryIO, begin: int, end: int) -> bool:
        """Add the bytes from `begin` to `end` of a file; returns whether it is that long."""
        file.seek(begin)
        for position in range(begin, end, PIECE):
            piece = file.read(min(PIECE, end - position))
            self.add(position, memoryview(piece))
            if position + len(piece) < min(position + PIECE, end):
                return False
        return True

    def add(self, position: int, data: memoryview) -> None:
        """Add data that will be written at byte `position`. A gap before it counts as zeros."""
        if self._end is None:
            self._begin = self._end = position
            self.start = -(-position // CHUNK) * CHUNK
            self._digest = None if position % CHUNK else blake3()
        if position < self._end:
            for chunk in range(position // CHUNK, -(-(position + len(data)) // CHUNK)):
                self.known.pop(chunk, None)
            return
        self._update(memoryview(bytes(position - self._end)))
        self._update(data)

    def _update(self, data: memoryview) -> None:
        assert self._end is not None
        while data:
            piece = data[: CHUNK - self._end % CHUNK]
            data = data[len(piece) :]
            self._all.update(piece)
            if self._end < self.start:
                self._before.update(piece)
            self._end += len(piece)
            if self._digest is not None:
                self._digest.update(piece)
                self.known[(self._end - 1) // CHUNK] = self._digest.hexdigest(length=HASH)
            if self._end % CHUNK == 0:
                self._digest = blake3()

    def of_file(self, path: Path, head: bytes) -> tuple[str, ...]:
        """The hashes of all chunks of the file that was written from these data, and from `head` at its beginning.

        The chunks before `start`, which hold the head, are read. Raises `InputError` if they differ from what was
        written.
        """
        data, known, intact = blake3(), dict(self.known), True
        with path.open("rb") as file:
            for chunk in range(self.start // CHUNK):
                digest = blake3()
                end = (chunk + 1) * CHUNK
                for position in range(chunk * CHUNK, end, CACHED):
                    size = min(CACHED, end - position)
                    piece = file.read(size)
                    before = head[position:][:size].ljust(min(size, self._begin - position), b"\0")
                    intact &= piece.startswith(before)
                    data.update(memoryview(piece)[len(before) :])
                    digest.update(piece)
                known[chunk] = digest.hexdigest(length=HASH)
        if not intact or data.digest() != self._before.digest():
            raise InputError(f"{path}: differs from what was written to it; the disk is failing, use another one")
        return hash_chunks(path, known)


def hash_chunks(path: Path, known: Mapping[int, str] | None = None) -> tuple[str, ...]:
    """BLAKE3-128 in hex of each 64 MiB chunk of a file. Chunks whose hash is `known`, by number, are not read."""
    known, count = known or {}, -(-path.stat().st_size // CHUNK)
    with map_chunks(lambda chunk: known.get(chunk) or hash_chunk(path, chunk), count) as hashes:
        return tuple(hashes)


@contextmanager
def map_chunks(function: Callable[[int], Any], count: int, threads: int | None = None) -> Iterator[Iterator[Any]]:
    """Call the function with each chunk number, by default on one thread per usable CPU; yields the results in order.

    When the context ends, by an error or Ctrl-C too, only the calls that have begun are waited for.
    """
    pool = ThreadPoolExecutor(threads or usable_cpus())
    try:
        yield pool.map(function, range(count))
    finally:
        pool.shutdown(cancel_futures=True)


def hash_bytes(data: bytes) -> str:
    """BLAKE3-128 of the data, in hex."""
    return blake3(data).hexdigest(length=HASH)


def hash_chunk(path: Path, chunk: int) -> str:
    """BLAKE3-128 of the chunk with that number, in hex."""
    digest = blake3()
    with open_regular(path) as file:
        file.seek(chunk * CHUNK)
        left = CHUNK
        while left and (piece := file.read(min(PIECE, left))):
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest(length=HASH)
