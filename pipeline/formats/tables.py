"""Checks of a .beton's tables, in pieces.

The tables of 14 million samples take 1.3 GB. They are views of the mapped file, whose pages all ranks of a node share
in the page cache; a check of all at once would need copies as large in each rank.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np

from pipeline.errors import InputError

ALIGNED = 4  # bytes; every part of a sample except the first begins at a multiple of this
PIECE = 1 << 13  # samples that are checked at a time: their tables fit into a core's cache


def pieces(count: int) -> Iterator[slice]:
    """Slices of at most `PIECE` samples that cover `count`."""
    return (slice(first, min(first + PIECE, count)) for first in range(0, count, PIECE))


def refuse(path: Path, bad: np.ndarray, first: int = 0) -> None:
    """Raise `InputError` with the first sample that is `bad`, bool [n] or [n, parts], of those from `first` on."""
    if bad.any():
        refuse_sample(path, first + int(np.nonzero(bad)[0][0]))


def refuse_sample(path: Path, sample: int) -> NoReturn:
    """Raise `InputError` with the number of a sample."""
    raise InputError(f"{path}: sample {sample} does not lie inside the file; prepare it again")


def in_sample_order(path: Path, table: np.ndarray) -> np.ndarray:
    """The allocation table in the order of the samples; FFCV's own files have it in that of its processes."""
    if not _is_in_order(table):
        flat = table.reshape(-1)
        table = flat[np.lexsort((flat["ptr"], flat["sample_id"]))].reshape(table.shape)
        if not _is_in_order(table):
            raise InputError(f"{path}: was never finished, or its allocation table is damaged; prepare it again")
    return table


def _is_in_order(table: np.ndarray) -> bool:
    return all(
        (table["sample_id"][piece] == np.arange(piece.start, piece.stop, dtype=np.uint64)[:, None]).all()
        for piece in pieces(len(table))
    )


def check_places(path: Path, offset: np.ndarray, size: np.ndarray, start: int, stop: int, page: int) -> None:
    """Raise `InputError` unless every part lies between `start` and `stop` and on one page, without gaps or overlaps.

    The sum of offset and size is not compared with `stop`, since it could overflow.
    """
    begins, sizes = offset.reshape(-1), size.reshape(-1)
    parts, in_file_order = offset.shape[1], True
    for piece in pieces(len(begins)):
        chosen = slice(piece.start, piece.stop + 1)  # and the part after it
        places, lengths = np.ascontiguousarray(begins[chosen]), np.ascontiguousarray(sizes[chosen])
        outside = (places < start) | (lengths <= 0) | (lengths > stop - places)
        crossing = (places ^ (places + lengths - 1)) >= page  # which is a power of two
        bad = np.flatnonzero(outside | crossing)
        if len(bad):
            refuse_sample(path, (piece.start + int(bad[0])) // parts)
        in_file_order = in_file_order and not _wrong_gaps(places, lengths, page).any()
    if not in_file_order:
        _check_gaps(path, begins, sizes, parts, page)


def _wrong_gaps(begins: np.ndarray, sizes: np.ndarray, page: int) -> np.ndarray:
    """Whether each part but the last overlaps the next, or lies too far from it: bool [n - 1]."""
    gap = begins[1:] - (begins[:-1] + sizes[:-1])
    return (gap < 0) | ((gap >= ALIGNED) & (begins[1:] & (page - 1) != 0))


def _check_gaps(path: Path, offset: np.ndarray, size: np.ndarray, parts: int, page: int) -> None:
    """Raise `InputError` where two parts, in whatever order they are stored, overlap or lie apart."""
    order = np.argsort(offset, kind="stable")
    for piece in pieces(len(offset) - 1):
        place = order[piece.start : piece.stop + 1]
        wrong = _wrong_gaps(offset[place], size[place], page)
        if wrong.any():
            first, second = place[wrong.argmax() :][:2] // parts
            raise InputError(f"{path}: samples {first} and {second} overlap or lie apart; prepare it again")
