"""Hashes of a file's blocks of 64 MiB. A manifest lists them, so that each block can be checked on its own."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3

from pipeline.cgroups import usable_cpus

BLOCK = 64 << 20  # bytes per hash
PIECE = 4 << 20  # bytes read at a time
HASH = 16  # bytes of a hash (BLAKE3-128)


class BlockHashes:
    """The hashes of a file's blocks, computed from the data before they are written.

    `known` holds, by number, the hash in hex of each block that was written in order and only once. `hash_blocks`
    reads the others: all before byte `start`, where the first such block begins, and those that were written again.
    """

    def __init__(self) -> None:
        self.known: dict[int, str] = {}
        self.start = 0
        self._end: int | None = None  # position after the data so far
        self._digest: blake3 | None = None  # of the block at `_end`, if its data were added from its first byte on

    def add(self, position: int, data: memoryview) -> None:
        """Add data that will be written at byte `position`. A gap before it counts as zeros."""
        if self._end is None:
            self._end, self.start = position, -(-position // BLOCK) * BLOCK
            self._digest = None if position % BLOCK else blake3()
        if position < self._end:
            for block in range(position // BLOCK, -(-(position + len(data)) // BLOCK)):
                self.known.pop(block, None)
            return
        self._update(memoryview(bytes(position - self._end)))
        self._update(data)

    def _update(self, data: memoryview) -> None:
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
    """BLAKE3-128 in hex of each 64 MiB block of a file. Blocks whose hash is `known`, by number, are not read."""
    known, count = known or {}, -(-path.stat().st_size // BLOCK)
    with map_blocks(lambda block: known.get(block) or hash_block(path, block), count) as hashes:
        return tuple(hashes)


@contextmanager
def map_blocks(function: Callable[[int], Any], count: int) -> Iterator[Iterator[Any]]:
    """Call the function with each block number, on one thread per usable CPU; yields the results in order.

    When the context ends, by an error or Ctrl-C too, only the calls that have begun are waited for.
    """
    pool = ThreadPoolExecutor(usable_cpus())
    try:
        yield pool.map(function, range(count))
    finally:
        pool.shutdown(cancel_futures=True)


def hash_bytes(data: bytes) -> str:
    """BLAKE3-128 of the data, in hex."""
    return blake3(data).hexdigest(length=HASH)


def hash_block(path: Path, block: int) -> str:
    """BLAKE3-128 of the block with that number, in hex."""
    digest = blake3()
    with path.open("rb") as file:
        file.seek(block * BLOCK)
        left = BLOCK
        while left and (piece := file.read(min(PIECE, left))):
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest(length=HASH)
