"""FFCV's .beton format, version 2, as numpy types, and functions that open its tables and refuse damaged ones.

Layout: header, field descriptors, one metadata record per sample, pages of data, allocation table. FFCV's own
`Reader` checks none of it, and importing it takes 4 s per process (a numba dictionary is compiled at import).
`tests/data_prep/test_ffcv_reads.py` checks that these types equal FFCV's.

The tables of 14 million samples take 1.3 GB. They are views of the mapped file, whose pages all ranks of a node share
in the page cache; a check of all at once would need copies as large in each rank. So they are checked in pieces.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np

from widemix.errors import InputError
from widemix.files import open_regular

VERSION = 2
FLOAT_FIELD, INT_FIELD, IMAGE_FIELD, BYTES_FIELD, ARRAY_FIELD, JSON_FIELD, TENSOR_FIELD = range(7)
COEFFICIENTS_FIELD = 255  # a custom field to FFCV, which refuses the file; its record is that of an image
TYPES = {
    FLOAT_FIELD: "FloatField",
    INT_FIELD: "IntField",
    IMAGE_FIELD: "RGBImageField",
    BYTES_FIELD: "BytesField",
    ARRAY_FIELD: "NDArrayField",
    JSON_FIELD: "JSONField",
    TENSOR_FIELD: "TorchTensorField",
    COEFFICIENTS_FIELD: "JPEG coefficients",
}
HEADER = np.dtype(
    [("version", "<u2"), ("num_fields", "<u2"), ("page_size", "<u4"), ("num_samples", "<u8"), ("table", "<u8")],
    align=True,
)
FIELD = np.dtype([("type_id", "<u1"), ("name", ("<u1", 16)), ("arguments", ("<u1", (1024,)))], align=True)
ALLOCATION = np.dtype([("sample_id", "<u8"), ("ptr", "<u8"), ("size", "<u8")])

# Types of fields whose data are in the pages.
ALLOCATING = (IMAGE_FIELD, BYTES_FIELD, ARRAY_FIELD, JSON_FIELD, TENSOR_FIELD, COEFFICIENTS_FIELD)
ALIGNED = 4  # bytes; every part of a sample except the first begins at a multiple of this
PIECE = 1 << 13  # samples that are checked at a time: their tables fit into a core's cache

Fields = tuple[tuple[str, int], ...]  # (name, FFCV's type) of each field


class Tables(NamedTuple):
    """The tables of a file with any fields, after the checks that do not depend on the fields."""

    bytes: np.ndarray  # uint8 [file size], memory-mapped, read-only
    fields: Fields
    arguments: np.ndarray  # uint8 [fields, 1024], FFCV's arguments of each field
    samples: np.ndarray  # [n], one record per sample, a view of the file
    samples_at: int  # their place in the file, bytes
    offset: np.ndarray  # int64 [n, fields that have data], bytes from the start of the file; a view of the table
    size: np.ndarray  # int64 [n, fields that have data], bytes; a view of the table


def open_tables(path: Path, layout: Callable[[Fields], np.dtype | None], wanted: str) -> Tables:
    """Memory-map a file with any fields.

    layout: returns the dtype of a sample's record for the fields of the file; None if they are not those `wanted`.

    Raises `InputError` for other fields, and for tables that do not fit the file or each other.
    """
    try:
        with open_regular(path) as file:
            mapped = np.memmap(file, np.uint8, "r")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; `widemix prep` writes it") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None

    header = _table(path, mapped, HEADER, 0, 1)[0]
    if header["version"] != VERSION:
        raise InputError(f"{path}: version {header['version']} of FFCV's format; only version {VERSION} can be read")
    page = int(header["page_size"])
    if page == 0 or page & (page - 1):  # FFCV finds pages by shifts
        raise InputError(f"{path}: has pages of {page} bytes, which is not a power of two; prepare it again")
    described = _table(path, mapped, FIELD, HEADER.itemsize, int(header["num_fields"]))
    fields = tuple((_name(field["name"]), int(field["type_id"])) for field in described)
    record = layout(fields)
    if record is None:
        held = ", ".join(f"{name} ({TYPES.get(kind, 'unknown type')})" for name, kind in fields)
        raise InputError(f"{path}: holds {held}, not {wanted}")

    count = int(header["num_samples"])
    samples = _table(path, mapped, record, HEADER.itemsize + described.nbytes, count)
    parts = sum(kind in ALLOCATING for _, kind in fields)
    table = _table(path, mapped, ALLOCATION, int(header["table"]), count * parts)
    if int(header["table"]) + table.nbytes != len(mapped):
        raise InputError(f"{path}: has bytes after its allocation table, or its header is damaged; prepare it again")
    table = in_sample_order(path, table.reshape(count, parts))
    offset, size = (table[name].view(np.int64) for name in ("ptr", "size"))
    tables_end = HEADER.itemsize + described.nbytes + samples.nbytes
    check_places(path, offset, size, tables_end, int(header["table"]), page)
    return Tables(mapped, fields, described["arguments"], samples, HEADER.itemsize + described.nbytes, offset, size)


Opened = TypeVar("Opened")


def reopen(open_file: Callable[[Path], Opened], path: Path) -> Opened:
    """The file that a pickle names, opened where the pickle is read."""
    try:
        return open_file(path)
    except InputError as error:
        raise InputError(
            f"{error} (a pickle holds this path and not the data: send the prepared folder too)"
        ) from None


def _name(field: np.ndarray) -> str:
    return field.tobytes().rstrip(b"\0").decode("ascii", "replace")


def _table(path: Path, mapped: np.ndarray, kind: np.dtype, offset: int, count: int) -> np.ndarray:
    if offset + count * kind.itemsize > len(mapped):
        raise InputError(f"{path}: is cut short at {len(mapped)} bytes; prepare it again")
    return np.frombuffer(mapped, kind, count, offset)


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
