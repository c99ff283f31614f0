"""Encoded samples -> a .beton in FFCV's format, in sample order, by a writer that can be killed and resumed.

FFCV's own writer hangs forever if a worker dies, orders samples by which process finished first, and cannot keep a
JPEG's own bytes. Here one process writes, so that the file depends on the samples and settings only.
"""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from data_prep.disk import DiskFile
from data_prep.journal import Journal
from pipeline.errors import InputError
from pipeline.formats.beton import (
    ALIGNED,
    ALLOCATING,
    ALLOCATION,
    FIELD,
    FIELDS,
    HEADER,
    SAMPLE,
    SEGMENT_FIELDS,
    SEGMENTED,
    TYPES,
    VERSION,
)

PAGE = 8 << 20  # bytes; FFCV's default. No sample crosses a page: FFCV's process cache relies on that
SHARD = 64 << 20  # bytes of data between two journal entries; a kill loses up to three, with what waits for the disk


class Record(Protocol):
    """A sample ready to be written."""

    @property
    def name(self) -> str:
        """The sample's name in messages and in the manifest."""

    @property
    def parts(self) -> tuple[bytes, ...]:
        """The data of each field that has data; empty if the sample is left out."""

    @property
    def rule(self) -> str:
        """What was unusual about the sample, or ""."""

    def row(self, positions: Sequence[int]) -> tuple:
        """The record in the table of samples, with the parts at these positions (bytes from the file's start)."""


class Layout(NamedTuple):
    """The fields of a file, as (name, FFCV's type, FFCV's arguments), and the dtype of a sample's record."""

    fields: tuple[tuple[str, int, bytes], ...]
    sample: np.dtype

    @property
    def parts(self) -> int:
        """The number of fields that have data."""
        return sum(kind in ALLOCATING for _, kind, _ in self.fields)

    @property
    def types(self) -> dict[str, str]:
        """The name of FFCV's type for each field name."""
        return {name: TYPES[kind] for name, kind, _ in self.fields}


PICTURES = Layout(tuple((name, kind, b"") for name, kind in FIELDS), SAMPLE)
SEGMENTED_PICTURES = Layout(tuple((name, kind, b"") for name, kind in SEGMENT_FIELDS), SEGMENTED)


class BetonWriter:
    """Writes a file: `add` takes the samples from number `taken` on, `finish` completes it. A context manager.

    After every 64 MiB the data are flushed to disk, while more is written, and an entry is added to the journal. A
    new writer on the same two files resumes after the last entry. The header is written last, so that an unfinished
    file cannot be opened.
    """

    def __init__(self, path: Path, journal: Path, expected: int, layout: Layout = PICTURES) -> None:
        """Write to `path`, with the journal at `journal`, at most `expected` samples."""
        self.layout = layout
        self.journal = Journal(journal)
        self.samples = np.zeros(expected, layout.sample)
        self.table = np.zeros((expected, layout.parts), ALLOCATION)
        self.exceptions: list[dict[str, str]] = []
        self.taken = 0  # samples processed, including those left out
        self.count = 0  # samples written
        self.position = _next_page(_tables_end(expected, layout))
        self._recover(path.stat().st_size if path.exists() else 0)
        self.saved = (self.count, self.position, len(self.exceptions))
        self.page: list[bytes] = []  # the data from `page_start` to `position`, not yet passed to `disk`
        self.page_start = self.position
        self.disk = DiskFile(path, self.position if self.taken else 0)

    def __enter__(self) -> "BetonWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.disk.close()

    def add(self, item: Record) -> None:
        """Write the next sample; one without parts is left out. Raises `InputError` if it is larger than a page."""
        self.taken += 1
        if item.rule:
            self.exceptions.append({"file": item.name, "rule": item.rule})
        parts = item.parts
        if not parts:
            return
        positions = self._place(item.name, parts)
        self.samples[self.count] = item.row(positions)
        for number, (position, part) in enumerate(zip(positions, parts, strict=True)):
            self.table[self.count, number] = (self.count, position, len(part))
        self.count += 1
        if self.position - self.page_start >= PAGE:
            self._send_page()
        if self.position - self.saved[1] >= SHARD:
            self._save()

    def finish(self) -> None:
        """Write the tables and the header, and flush the file to disk."""
        self._send_page()
        self.disk.write(self.position, [self.table[: self.count].tobytes()])
        head = _head(self.layout, self.count, self.position)
        self.disk.write(0, [head, self.samples[: self.count].tobytes()])
        self.disk.flush(then=lambda: None)
        self.disk.wait()

    @property
    def labels(self) -> np.ndarray:
        """The labels of the samples written: int64 [count]."""
        names = [name for name, _, _ in self.layout.fields]
        return self.samples[f"f{names.index('label')}"][: self.count]

    def _place(self, name: str, parts: Sequence[bytes]) -> list[int]:
        """Append the parts to the page, or to the next one if they do not fit; returns their positions in bytes."""
        size = sum(map(len, parts)) + (len(parts) - 1) * ALIGNED
        if size > PAGE:
            raise InputError(
                f"{name}: takes {size} bytes, and a page of the file holds {PAGE}; shrink images with a max_size"
            )
        if self.position % PAGE + size > PAGE:
            self._send_page()
            self.page_start = self.position = _next_page(self.position)
        positions: list[int] = []
        for part in parts:
            gap = -self.position % ALIGNED if positions else 0
            self.page += bytes(gap), part
            positions.append(self.position + gap)
            self.position += gap + len(part)
        return positions

    def _save(self) -> None:
        self._send_page()
        count, _, exceptions = self.saved
        new = slice(count, self.count)
        entry = {"taken": self.taken, "samples": _text(self.samples[new]), "table": _text(self.table[new])}
        entry["exceptions"] = self.exceptions[exceptions:]
        self.disk.flush(then=lambda: self.journal.append(entry))
        self.saved = (self.count, self.position, len(self.exceptions))

    def _send_page(self) -> None:
        self.disk.write(self.page_start, self.page)
        self.page, self.page_start = [], self.position

    def _recover(self, size: int) -> None:
        """Continue after the last journal entry whose data the file, of `size` bytes, holds."""
        kept = 0
        for entry in self.journal.entries():
            table = np.frombuffer(base64.b64decode(entry["table"]), ALLOCATION).reshape(-1, self.layout.parts)
            end = int(table["ptr"][-1, -1] + table["size"][-1, -1])
            if end > size:
                break
            new = slice(self.count, self.count + len(table))
            self.table[new] = table
            self.samples[new] = np.frombuffer(base64.b64decode(entry["samples"]), self.layout.sample)
            self.exceptions += entry["exceptions"]
            self.taken, self.count, self.position = entry["taken"], new.stop, end
            kept += 1
        self.journal.truncate(kept)


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def expected_bytes(count: int, data: float, layout: Layout = PICTURES) -> int:
    """The approximate size in bytes of a file of `count` samples with `data` bytes of data in all."""
    unused = 0.5 * data / max(count, 1) * data / PAGE  # half a sample at the end of each page
    return _next_page(_tables_end(count, layout)) + round(data + unused) + count * layout.parts * ALLOCATION.itemsize


def _tables_end(count: int, layout: Layout) -> int:
    return HEADER.itemsize + len(layout.fields) * FIELD.itemsize + count * layout.sample.itemsize


def _next_page(position: int) -> int:
    return -(-position // PAGE) * PAGE


def _head(layout: Layout, count: int, table: int) -> bytes:
    """The header and the field descriptors."""
    fields = np.zeros(len(layout.fields), FIELD)
    for field, (name, kind, arguments) in zip(fields, layout.fields, strict=True):
        field["type_id"] = kind
        field["name"][: len(name)] = np.frombuffer(name.encode("ascii"), np.uint8)
        field["arguments"][: len(arguments)] = np.frombuffer(arguments, np.uint8)
    return np.array((VERSION, len(fields), PAGE, count, table), HEADER).tobytes() + fields.tobytes()
