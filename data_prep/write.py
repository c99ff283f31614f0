"""Encoded samples -> a .beton of FFCV's format, written in sample order and never left half done.

FFCV's own writer hangs for ever when a worker dies, places samples by whichever process came first, and cannot keep
a JPEG's own bytes. Here one process writes, so the file depends on the samples and settings alone.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data_prep.beton import ALLOCATION, FIELD, FIELDS, HEADER, SAMPLE, VERSION
from data_prep.picture import Encoded
from pipeline.errors import InputError

PAGE = 8 << 20  # bytes; FFCV's default. No sample crosses a page, which its process cache relies on


def write_beton(path: Path, encoded: Iterable[Encoded], expected: int) -> tuple[int, list[dict[str, str]]]:
    """Write up to `expected` samples to a new file and flush it to disk.

    Returns the number written and the exceptions, `{"file", "rule"}`. Samples without data are left out. The header
    comes last: a file whose writing was cut short has none and opens nowhere.
    """
    samples = np.zeros(expected, SAMPLE)
    table = np.zeros(expected, ALLOCATION)
    exceptions: list[dict[str, str]] = []
    count = 0
    with path.open("wb", buffering=PAGE) as file:
        position = _next_page(_tables_end(expected))
        file.seek(position)
        for item in encoded:
            if item.rule:
                exceptions.append({"file": item.name, "rule": item.rule})
            if not item.data:
                continue
            position = _place(file, position, item)
            samples[count] = ((item.mode, item.width, item.height, position), item.label)
            table[count] = (count, position, len(item.data))
            position += len(item.data)
            count += 1
        file.write(table[:count].tobytes())
        file.seek(0)
        file.write(_header(count, position) + _fields() + samples[:count].tobytes())
        file.flush()
        os.fsync(file.fileno())
    return count, exceptions


def _tables_end(count: int) -> int:
    return HEADER.itemsize + len(FIELDS) * FIELD.itemsize + count * SAMPLE.itemsize


def _next_page(position: int) -> int:
    return -(-position // PAGE) * PAGE


def _place(file: BinaryIO, position: int, item: Encoded) -> int:
    """Write the bytes at `position`, or at the next page when they would cross into it; return where."""
    if len(item.data) > PAGE:
        raise InputError(
            f"{item.name}: takes {len(item.data)} bytes and a page of the file holds {PAGE}; "
            f"give a maximal size (longest side, pixels)"
        )
    if position % PAGE + len(item.data) > PAGE:
        position = _next_page(position)
        file.seek(position)
    file.write(item.data)
    return position


def _header(count: int, table: int) -> bytes:
    return np.array((VERSION, len(FIELDS), PAGE, count, table), HEADER).tobytes()


def _fields() -> bytes:
    fields = np.zeros(len(FIELDS), FIELD)
    for field, (name, kind) in zip(fields, FIELDS, strict=True):
        field["type_id"] = kind
        field["name"][: len(name)] = np.frombuffer(name.encode("ascii"), np.uint8)
    return fields.tobytes()
