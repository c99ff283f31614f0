"""Requests parts of a file from the disk before they are read."""

import os

import numpy as np

_PIECE = 128 << 10  # bytes; of a longer request Linux reads the beginning and forgets the rest


def request_ranges(file: int, ranges: np.ndarray) -> None:
    """Let the kernel read these bytes, int64 [n, 2] of start and stop, into its page cache; returns at once.

    `file` is the open descriptor that they are then read by: the file may be renamed meanwhile.
    """
    for start, stop in ranges.tolist():
        for piece in range(start, stop, _PIECE):
            os.posix_fadvise(file, piece, min(_PIECE, stop - piece), os.POSIX_FADV_WILLNEED)
