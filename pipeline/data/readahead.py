"""Asks the kernel for parts of a file before they are read."""

import os
import weakref
from pathlib import Path

import numpy as np

_PIECE = 128 << 10  # bytes; of a longer request Linux reads the beginning and forgets the rest


class Readahead:
    """An open file whose parts can be asked for. Asking does not wait for the disk."""

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def ask(self, ranges: np.ndarray) -> None:
        """Bring these bytes, int64 [n, 2] of start and stop, into the page cache while others are worked on."""
        for start, stop in ranges.tolist():
            for piece in range(start, stop, _PIECE):
                os.posix_fadvise(self._file, piece, min(_PIECE, stop - piece), os.POSIX_FADV_WILLNEED)
