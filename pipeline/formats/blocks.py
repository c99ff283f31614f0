"""Hashes of a file's blocks: a manifest tells them, and whoever reads or copies the file can check each by itself."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3

from pipeline.cgroups import usable_cpus

BLOCK = 64 << 20  # bytes that one hash covers
PIECE = 4 << 20  # bytes read at a time
HASH = 16  # bytes of a BLAKE3


class BlockHashes:
    """The hashes of what is on its way to a file, taken in passing: they tell of what should be on disk.

    `known` by number: blocks of which all was written once, in order. The others are left to `hash_blocks`, which
    reads them: all before `start`, where the first one begins that is followed, and those that are written again.
    """

    def __init__(self) -> None:
        self.known: dict[int, str] = {}
        self.start = 0
        self._end: int | None = None  # of what was written so far
        self._digest: blake3 | None = None  # of the block there, if it was followed from its first byte

    def add(self, position: int, data: memoryview) -> None:
        """Data that are written at `position`; what is jumped over stays zero."""
        if self._end is None:
            self._end, self.start = position, -(-position // BLOCK) * BLOCK
            self._digest = None if position % BLOCK else blake3()
        if position < self._end:
            for block in range(position // BLOCK, -(-(position + len(data)) // BLOCK)):
                self.known.pop(block, None)
            return
        self._follow(memoryview(bytes(position - self._end)))
        self._follow(data)

    def _follow(self, data: memoryview) -> None:
        assert self._end is not None
        while data:
            piece = data[: BLOCK - self._end % BLOCK]
            data = data[len(piece) :]
            self._end += len(piece)
            if self._digest is not None:
                self._digest.update(piece)
                self.known[(self._end - 1) // BLOCK] = self._digest.hexdigest(length=HASH)
            if self._end % BLOCK == 0:
                self._digest = blake3()


def hash_blocks(path: Path, known: Mapping[int, str] | None = None) -> tuple[str, ...]:
    """BLAKE3-128 of each 64 MiB block of a file. Those that are `known`, by their numbers, are not read."""
    told, count = known or {}, -(-path.stat().st_size // BLOCK)
    with of_blocks(lambda block: told.get(block) or hash_block(path, block), count) as found:
        return tuple(found)


@contextmanager
def of_blocks(function: Callable[[int], Any], count: int) -> Iterator[Iterator[Any]]:
    """What the function makes of each block's number, by as many threads as there are usable CPUs.

    Whatever ends the context, Ctrl-C too, waits for the blocks under way only.
    """
    pool = ThreadPoolExecutor(usable_cpus())
    try:
        yield pool.map(function, range(count))
    finally:
        pool.shutdown(cancel_futures=True)


def hash_bytes(data: bytes) -> str:
    """BLAKE3-128 in hex."""
    return blake3(data).hexdigest(length=HASH)


def hash_block(path: Path, block: int) -> str:
    """BLAKE3-128 of the block of that number, in hex."""
    digest = blake3()
    with path.open("rb") as file:
        file.seek(block * BLOCK)
        left = BLOCK
        while left and (piece := file.read(min(PIECE, left))):
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest(length=HASH)
