"""Encoded samples -> a .beton of FFCV's format, in sample order, by a writer that can be killed and started again.

FFCV's own writer hangs for ever when a worker dies, places samples by whichever process came first, and cannot keep
a JPEG's own bytes. Here one process writes, so the file depends on the samples and settings alone.
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

PAGE = 8 << 20  # bytes; FFCV's default. No sample crosses a page, which its process cache relies on
SHARD = 64 << 20  # bytes of data between two journal lines; of what waits for the disk too a kill can cost three


class Record(Protocol):
    """A sample ready to be written: `parts` in the pages, and what `row` makes of their places in the tables."""

    @property
    def name(self) -> str: ...
    @property
    def parts(self) -> tuple[bytes, ...]: ...  # one for each field that has data; none where it is left out
    @property
    def rule(self) -> str: ...
    def row(self, positions: Sequence[int]) -> tuple: ...


class Layout(NamedTuple):
    """The fields of a file, (name, FFCV's type, FFCV's arguments), and the record that a sample has of them."""

    fields: tuple[tuple[str, int, bytes], ...]
    sample: np.dtype

    @property
    def parts(self) -> int:
        """Fields that have data."""
        return sum(kind in ALLOCATING for _, kind, _ in self.fields)

    @property
    def types(self) -> dict[str, str]:
        """The fields' names, each with that of FFCV's type."""
        return {name: TYPES[kind] for name, kind, _ in self.fields}


PICTURES = Layout(tuple((name, kind, b"") for name, kind in FIELDS), SAMPLE)
SEGMENTED_PICTURES = Layout(tuple((name, kind, b"") for name, kind in SEGMENT_FIELDS), SEGMENTED)


class BetonWriter:
    """Writes the samples that `add` is given, from number `taken` on, to a file that `finish` completes.

    At every 64 MiB the data are flushed to disk, beside what is written next, and the journal says so; a writer on
    the same files takes up there. The header comes last: a file that was never finished has none, and opens nowhere.
    Use as a context manager.
    """

    def __init__(self, path: Path, journal: Path, expected: int, layout: Layout = PICTURES) -> None:
        self.layout = layout
        self.journal = Journal(journal)
        self.samples = np.zeros(expected, layout.sample)
        self.table = np.zeros((expected, layout.parts), ALLOCATION)
        self.exceptions: list[dict[str, str]] = []
        self.taken = 0  # samples behind us, those left out included
        self.count = 0  # samples written
        self.position = _next_page(_tables_end(expected, layout))
        self._recover(path.stat().st_size if path.exists() else 0)
        self.saved = (self.count, self.position, len(self.exceptions))
        self.page: list[bytes] = []  # what lies from `begun` to `position`, and is not yet on its way
        self.begun = self.position
        self.disk = DiskFile(path, self.position if self.taken else 0)

    def __enter__(self) -> "BetonWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.disk.close()

    def add(self, item: Record) -> None:
        """Write the next sample; one without parts is left out."""
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
        if self.position - self.begun >= PAGE:
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
        """Of the samples written: int64 [count]."""
        names = [name for name, _, _ in self.layout.fields]
        return self.samples[f"f{names.index('label')}"][: self.count]

    def _place(self, name: str, parts: Sequence[bytes]) -> list[int]:
        """Lay the parts down here, or at the next page when they would cross into it; returns where they lie."""
        size = sum(map(len, parts)) + (len(parts) - 1) * ALIGNED
        if size > PAGE:
            raise InputError(
                f"{name}: takes {size} bytes and a page of the file holds {PAGE}; give a maximal size in pixels"
            )
        if self.position % PAGE + size > PAGE:
            self._send_page()
            self.begun = self.position = _next_page(self.position)
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
        line = {"taken": self.taken, "samples": _text(self.samples[new]), "table": _text(self.table[new])}
        line["exceptions"] = self.exceptions[exceptions:]
        self.disk.flush(then=lambda: self.journal.append(line))
        self.saved = (self.count, self.position, len(self.exceptions))

    def _send_page(self) -> None:
        self.disk.write(self.begun, self.page)
        self.page, self.begun = [], self.position

    def _recover(self, size: int) -> None:
        """Take up what the journal tells of and the file, of `size` bytes, does hold."""
        kept = 0
        for line in self.journal.lines():
            table = np.frombuffer(base64.b64decode(line["table"]), ALLOCATION).reshape(-1, self.layout.parts)
            end = int(table["ptr"][-1, -1] + table["size"][-1, -1])
            if end > size:
                break
            new = slice(self.count, self.count + len(table))
            self.table[new] = table
            self.samples[new] = np.frombuffer(base64.b64decode(line["samples"]), self.layout.sample)
            self.exceptions += line["exceptions"]
            self.taken, self.count, self.position = line["taken"], new.stop, end
            kept += 1
        self.journal.rewind(kept)


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def expected_bytes(count: int, data: float, layout: Layout = PICTURES) -> int:
    """About how large a file of `count` samples, together `data` bytes, becomes."""
    unused = 0.5 * data / max(count, 1) * data / PAGE  # half a sample at the end of each page
    return _next_page(_tables_end(count, layout)) + round(data + unused) + count * layout.parts * ALLOCATION.itemsize


def _tables_end(count: int, layout: Layout) -> int:
    return HEADER.itemsize + len(layout.fields) * FIELD.itemsize + count * layout.sample.itemsize


def _next_page(position: int) -> int:
    return -(-position // PAGE) * PAGE


def _head(layout: Layout, count: int, table: int) -> bytes:
    """The header and the fields."""
    fields = np.zeros(len(layout.fields), FIELD)
    for field, (name, kind, arguments) in zip(fields, layout.fields, strict=True):
        field["type_id"] = kind
        field["name"][: len(name)] = np.frombuffer(name.encode("ascii"), np.uint8)
        field["arguments"][: len(arguments)] = np.frombuffer(arguments, np.uint8)
    return np.array((VERSION, len(fields), PAGE, count, table), HEADER).tobytes() + fields.tobytes()
