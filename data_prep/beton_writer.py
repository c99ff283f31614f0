"""Encoded samples -> a .beton in FFCV's format, in sample order, by a writer that can be killed and resumed.

FFCV's own writer hangs forever if a worker dies, orders samples by which process finished first, and cannot keep a
JPEG's own bytes. Here one process writes, so that the file depends on the samples and settings only.
"""

import base64
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from widemix.data_prep.records import IMAGES, Layout, Record
from widemix.data_prep.samples import Origin
from widemix.data_prep.settings import PAGE
from widemix.data_prep.unfinished import DiskFile, Journal
from widemix.errors import InputError
from widemix.formats.checksums import NUMBER, sample_checksum
from widemix.formats.chunks import ChunkHashes
from widemix.formats.tables import ALIGNED, ALLOCATION, FIELD, HEADER, VERSION

SHARD = 64 << 20  # bytes of data between two journal entries; a kill loses up to three, with what waits for the disk
ORIGIN = np.dtype([("checksum", "<u4"), ("size", "<i8"), ("mtime_ns", "<i8"), ("ctime_ns", "<i8")])
PER_SAMPLE = ("samples", "table", "checksums", "stored")  # the tables with a row for each sample that was written


class BetonWriter:
    """Writes a file: `add` takes the samples from number `taken` on, `finish` completes it. A context manager.

    After every 64 MiB the data are flushed to disk, while more is written, and an entry is added to the journal. A
    new writer on the same two files resumes after the last entry whose data have the hash that it states. The header
    is written last, so that an unfinished file cannot be opened.
    """

    def __init__(
        self, path: Path, journal: Path, expected: int, layout: Layout = IMAGES, *, page: int = 0, seed: str = ""
    ) -> None:
        """Write to `path`, with the journal at `journal`, at most `expected` samples.

        page: bytes; no sample crosses a multiple of it; 0 for `PAGE`. seed: what else the file depends on; with
        another one nothing is resumed.
        """
        self.path, self.layout, self.page = path, layout, page or PAGE
        self.journal = Journal(journal, seed)
        self.begin = next_page(_tables_end(expected, layout), self.page)
        self.written = Written(expected, layout.sample, layout.parts, self.begin)
        hashes = self._recover()
        self.has_resumed = self.written.taken > 0
        self.pending: list[bytes] = []  # the data from `pending_start` to the position, not yet passed to `disk`
        self.pending_start = self.written.position
        self.disk = DiskFile(path, self.pending_start if self.has_resumed else 0, hashes)

    def __enter__(self) -> "BetonWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.disk.close()

    def add(self, item: Record) -> None:
        """Write the next sample; one without parts is left out.

        Raises `InputError` if it is larger than a page, or differs from what was encoded.
        """
        written = self.written
        written.take(item.name, item.rule, item.origin)
        parts = item.parts
        if not parts:
            return
        blocks = item.blocks(parts)
        checksum = sample_checksum(item.numbers(parts), blocks)
        if item.checksum not in (None, checksum):
            raise InputError(f"{item.name}: was changed while it was prepared; run the same command again")
        positions = self._place(item.name, parts)
        places = [(position, len(part)) for position, part in zip(positions, parts, strict=True)]
        bands = np.array(blocks, NUMBER).tobytes() if item.has_bands else b""
        written.add(item.row(positions), places, checksum, bands)
        if written.position - self.pending_start >= PAGE:
            self._send()
        if written.unsaved >= SHARD:
            self._send()
            entry = written.next_entry()
            self.disk.flush(then=lambda digest: self.journal.append(entry | {"data": digest}))

    def finish(self) -> tuple[str, ...]:
        """Write the tables and the header, and flush the file to disk; returns the hashes of its blocks.

        Raises `InputError` if the disk does not hold what was written to it.
        """
        self._send()
        written = self.written
        self.disk.write(written.position, [written.table[: written.count].tobytes()])
        head = self._head() + written.samples[: written.count].tobytes()
        gap = self.begin - len(head) if self.has_resumed else 0  # no journal entry tells whether it still holds zeros
        self.disk.write(0, [head, bytes(gap)])
        self.disk.flush(then=lambda _: None)
        self.disk.wait()
        return self.disk.hashes.of_file(self.path, head)

    @property
    def labels(self) -> np.ndarray:
        """The labels of the samples written: int64 [count]."""
        names = [name for name, _, _ in self.layout.fields]
        return self.written.samples[f"f{names.index('label')}"][: self.written.count]

    def checksum_file(self) -> bytes:
        """The checksums of the samples written, as pipeline/formats/checksums.py describes."""
        return self.written.checksums[: self.written.count].tobytes() + bytes(self.written.bands)

    def _place(self, name: str, parts: Sequence[bytes]) -> list[int]:
        """Append the parts to the page, or to the next one if they do not fit; returns their positions in bytes."""
        written = self.written
        size = sum(map(len, parts)) + (len(parts) - 1) * ALIGNED
        if size > self.page:
            raise InputError(f"{name}: takes {size} bytes, and a page of the file holds {self.page}")
        if written.position % self.page + size > self.page:
            self._send()
            self.pending_start = written.position = next_page(written.position, self.page)
        positions: list[int] = []
        for part in parts:
            gap = -written.position % ALIGNED if positions else 0
            self.pending += bytes(gap), part
            positions.append(written.position + gap)
            written.position += gap + len(part)
        return positions

    def _send(self) -> None:
        self.disk.write(self.pending_start, self.pending)
        self.pending, self.pending_start = [], self.written.position

    def _recover(self) -> ChunkHashes:
        """Continue after the last journal entry whose data are in the file; returns the hashes of these data."""
        hashes = ChunkHashes()
        if not self.path.exists():
            return hashes
        with self.path.open("rb") as file, closing(self.journal.entries()) as entries:
            for entry in entries:
                longer = hashes.copy()
                if not longer.add_file(file, self.written.position, entry["end"]) or longer.all() != entry["data"]:
                    break
                hashes = longer
                self.written.restore(entry)
        return hashes

    def _head(self) -> bytes:
        """The header and the field descriptors."""
        fields = np.zeros(len(self.layout.fields), FIELD)
        for field, (name, kind, arguments) in zip(fields, self.layout.fields, strict=True):
            field["type_id"] = kind
            field["name"][: len(name)] = np.frombuffer(name.encode("ascii"), np.uint8)
            field["arguments"][: len(arguments)] = np.frombuffer(arguments, np.uint8)
        header = np.array((VERSION, len(fields), self.page, self.written.count, self.written.position), HEADER)
        return header.tobytes() + fields.tobytes()


def expected_bytes(count: int, data: float, layout: Layout = IMAGES, page: int = 0) -> int:
    """The approximate size in bytes of a file of `count` samples with `data` bytes of data in all."""
    page = page or PAGE
    unused = 0.5 * data / max(count, 1) * data / page  # half a sample at the end of each page
    begin = next_page(_tables_end(count, layout), page)
    return begin + round(data + unused) + count * layout.parts * ALLOCATION.itemsize


def next_page(position: int, page: int) -> int:
    """The first multiple of `page` from byte `position` on."""
    return -(-position // page) * page


def _tables_end(count: int, layout: Layout) -> int:
    return HEADER.itemsize + len(layout.fields) * FIELD.itemsize + count * layout.sample.itemsize


class Written:
    """The tables of a file, row by row, and what each sample was read from."""

    def __init__(self, expected: int, sample: np.dtype, parts: int, position: int) -> None:
        """Of at most `expected` samples, whose data begin at byte `position`.

        sample: the dtype of a record in the table of samples; parts: the fields that have data.
        """
        self.samples = np.zeros(expected, sample)
        self.table = np.zeros((expected, parts), ALLOCATION)
        self.checksums = np.zeros(expected, NUMBER)
        self.bands = bytearray()  # the checksums of bands, of the samples that have them
        self.origins = np.zeros(expected, ORIGIN)  # of all that were taken
        self.stored = np.zeros(expected, "<i8")  # the numbers of those that were written, among all that were taken
        self.exceptions: list[dict[str, str]] = []
        self.taken = 0  # samples processed, including those left out
        self.count = 0  # samples written
        self.position = position  # bytes; the end of the data
        self._mark()

    def take(self, name: str, rule: str, origin: Origin) -> None:
        """Count a sample as processed."""
        self.origins[self.taken] = (origin.checksum, *origin.status)
        self.taken += 1
        if rule:
            self.exceptions.append({"file": name, "rule": rule})

    def add(self, row: tuple, places: list[tuple[int, int]], checksum: int, bands: bytes) -> None:
        """Count the sample that was taken last as written, with position and size in bytes of each of its parts."""
        for number, place in enumerate(places):
            self.table[self.count, number] = (self.count, *place)
        self.samples[self.count] = row
        self.checksums[self.count] = checksum
        self.stored[self.count] = self.taken - 1
        self.bands += bands
        self.count += 1

    @property
    def unsaved(self) -> int:
        """Bytes of data after the last entry."""
        return self.position - self._saved[-1]

    def next_entry(self) -> dict[str, Any]:
        """A journal entry of what came after the last one."""
        taken, count, bands, exceptions, _ = self._saved
        new = slice(count, self.count)
        tables = {name: getattr(self, name)[new] for name in PER_SAMPLE}
        tables |= {"origins": self.origins[taken : self.taken], "bands": self.bands[bands:]}
        self._mark()
        encoded = {name: base64.b64encode(bytes(table)).decode("ascii") for name, table in tables.items()}
        return {"taken": self.taken, "end": self.position, "exceptions": self.exceptions[exceptions:], **encoded}

    def restore(self, entry: dict[str, Any]) -> None:
        """Continue after a journal entry."""
        for name in PER_SAMPLE:
            table = getattr(self, name)
            rows = np.frombuffer(base64.b64decode(entry[name]), table.dtype).reshape(-1, *table.shape[1:])
            table[self.count : self.count + len(rows)] = rows
        self.origins[self.taken : entry["taken"]] = np.frombuffer(base64.b64decode(entry["origins"]), ORIGIN)
        self.bands += base64.b64decode(entry["bands"])
        self.exceptions += entry["exceptions"]
        self.taken, self.count, self.position = entry["taken"], self.count + len(rows), entry["end"]
        self._mark()

    def _mark(self) -> None:
        self._saved = (self.taken, self.count, len(self.bands), len(self.exceptions), self.position)
