"""Requests parts of a file from the disk before they are read."""

import os
import weakref
from pathlib import Path

import numpy as np

_PIECE = 128 << 10  # bytes; of a longer request Linux reads the beginning and forgets the rest


class Readahead:
    """An open file, parts of which can be requested without waiting for the disk."""

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def request(self, ranges: np.ndarray) -> None:
        """Let the kernel read these bytes, int64 [n, 2] of start and stop, into its page cache; returns at once."""
        for start, stop in ranges.tolist():
            for piece in range(start, stop, _PIECE):
                os.posix_fadvise(self._file, piece, min(_PIECE, stop - piece), os.POSIX_FADV_WILLNEED)
