"""Checks of a .beton's tables, in pieces.

The tables of 14 million samples take 1.3 GB. They are views of the mapped file, whose pages all ranks of a node share
in the page cache; a check of all at once would need copies as large in each rank.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipeline.errors import InputError

ALIGNED = 4  # bytes; every part of a sample except the first begins at a multiple of this
PIECE = 1 << 14  # samples that are checked at a time: their tables fit into a core's cache


def pieces(count: int) -> Iterator[slice]:
    """Slices of at most `PIECE` samples that cover `count`."""
    return (slice(first, min(first + PIECE, count)) for first in range(0, count, PIECE))


def refuse(path: Path, bad: np.ndarray, first: int = 0) -> None:
    """Raise `InputError` with the first sample that is `bad`, bool [n] or [n, parts], of those from `first` on."""
    if bad.any():
        sample = first + int(np.nonzero(bad)[0][0])
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
    for piece in pieces(len(offset)):
        begins, sizes = np.ascontiguousarray(offset[piece]), np.ascontiguousarray(size[piece])
        refuse(path, (begins < start) | (sizes <= 0) | (sizes > stop - begins), piece.start)
        refuse(path, begins // page != (begins + sizes - 1) // page, piece.start)
    _check_gaps(path, offset.reshape(-1), size.reshape(-1), offset.shape[1], page)


def _check_gaps(path: Path, offset: np.ndarray, size: np.ndarray, parts: int, page: int) -> None:
    """Raise `InputError` where two parts overlap, or lie apart other than by alignment and the end of a page."""
    ascending = all((np.diff(offset[piece.start : piece.stop + 1]) >= 0).all() for piece in pieces(len(offset)))
    order = None if ascending else np.argsort(offset, kind="stable")
    for piece in pieces(len(offset) - 1):
        chosen = slice(piece.start, piece.stop + 1)
        place = chosen if order is None else order[chosen]
        begins, ends = offset[place], offset[place] + size[place]
        gap = begins[1:] - ends[:-1]
        wrong = (gap < 0) | ((gap >= ALIGNED) & (begins[1:] % page != 0))
        if wrong.any():
            numbers = np.arange(chosen.start, chosen.stop) if order is None else order[chosen]
            first, second = numbers[wrong.argmax() :][:2] // parts
            raise InputError(f"{path}: samples {first} and {second} overlap or lie apart; prepare it again")
