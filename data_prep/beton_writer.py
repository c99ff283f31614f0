"""Encoded samples -> a .beton in FFCV's format, in sample order, by a writer that can be killed and resumed.

FFCV's own writer hangs forever if a worker dies, orders samples by which process finished first, and cannot keep a
JPEG's own bytes. Here one process writes, so that the file depends on the samples and settings only.
"""

import base64
import json
import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from widemix.data_prep.records import IMAGES, Layout, Record
from widemix.data_prep.samples import Origin
from widemix.data_prep.settings import PAGE
from widemix.errors import InputError
from widemix.files import advise, open_regular, open_to_write
from widemix.formats.checksums import NUMBER, sample_checksum
from widemix.formats.chunks import ChunkHashes, hash_bytes
from widemix.formats.tables import ALIGNED, ALLOCATION, FIELD, HEADER, VERSION
from widemix.progress_line import print_status

MAX_PENDING = 16  # writes and flushes that may wait at a time, which bounds memory
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
        self.disk = DiskFile(path, self.pending_start if self.written.taken else 0, hashes)

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


class DiskFile:
    """A file with one thread that writes and one that flushes.

    What is on disk is dropped from the page cache: a data set larger than memory would evict everything else, and
    allocating new pages costs more than writing (512 MiB: 1.3 s on a virtual machine, 0.3 s in reused memory). The
    blocks are therefore hashed before they are written; `hashes` are complete once `wait` has returned.

    After one write or flush has failed, no later one is run, so that no journal entry can refer to data that are not
    on disk. The error, such as a full disk, is raised by one of the next calls; `close` raises nothing.
    """

    def __init__(self, path: Path, keep: int, hashes: ChunkHashes | None = None) -> None:
        """Continue an existing file after its first `keep` bytes, of which `hashes` are; with 0, write a new one."""
        self.file = open_to_write(path, "r+b" if keep else "wb")
        if keep:
            self.file.truncate(keep)
        self._writer, self._flusher = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.hashes = hashes or ChunkHashes()
        self._buffer = bytearray()
        self._pending: deque[Future[Any]] = deque()
        self._error: Exception | None = None

    def close(self) -> None:
        """Wait for both threads and close the file."""
        self._writer.shutdown()
        self._flusher.shutdown()
        self.file.close()

    def write(self, position: int, parts: Sequence[bytes]) -> None:
        """Queue a write of the parts, one after the other, from byte `position` on."""
        self._submit(self._writer, self._write, position, parts)

    def flush(self, then: Callable[[str], None]) -> None:
        """Queue a call of `then`, with the hash of all data so far, for when they are on disk."""
        written = self._submit(self._writer, self.hashes.all)
        self._submit(self._flusher, self._flush, written, then)

    def wait(self, pending: int = 0) -> None:
        """Wait until at most `pending` writes and flushes are left; raises the error of one that failed."""
        while len(self._pending) > pending:
            self._pending.popleft().result()

    def _submit(self, thread: ThreadPoolExecutor, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future = thread.submit(self._run, work, *arguments)
        self._pending.append(future)
        self.wait(MAX_PENDING)
        return future

    def _run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        if self._error:
            raise self._error
        try:
            return work(*arguments)
        except Exception as error:
            self._error = error
            raise

    def _write(self, position: int, parts: Sequence[bytes]) -> None:
        data = self._join(parts)
        self.hashes.add(position, data)
        self.file.seek(position)
        self.file.write(data)
        self.file.flush()
        # Linux drops the pages that are on disk, and starts to write back the others.
        advise(self.file.fileno(), self.hashes.start, 0, "DONTNEED")

    def _join(self, parts: Sequence[bytes]) -> memoryview:
        """The parts in one buffer, which the next call reuses."""
        size, at = sum(map(len, parts)), 0
        if size > len(self._buffer):
            self._buffer = bytearray(size)
        joined = memoryview(self._buffer)[:size]
        for part in parts:
            joined[at : at + len(part)] = part
            at += len(part)
        return joined

    def _flush(self, written: Future[str], then: Callable[[str], None]) -> None:
        digest = written.result()
        os.fsync(self.file.fileno())
        then(digest)


class Journal:
    """JSON lines, one per shard, each flushed to disk after the data that it describes.

    A line begins with the hash of itself, all lines before it, and `seed`. One that a kill or a crash cut short, or
    that was changed, is ignored, and so is everything after it.
    """

    def __init__(self, path: Path, seed: str = "") -> None:
        """The journal at `path`, which need not exist. `seed` is what the entries depend on: another one has none."""
        self.path = path
        self._hash = hash_bytes(seed.encode())  # of all lines so far

    def entries(self) -> Generator[dict[str, Any]]:
        """The intact entries, in the order in which they were appended. To be read once, before any `append`.

        The last one that is taken, and all after it, are removed if the iterator is closed instead of asked for more.
        """
        if not self.path.exists():
            return
        kept = 0
        try:
            with open_regular(self.path) as file:
                for number, line in enumerate(file):
                    stated, _, body = line.partition(b" ")
                    expected = self._chain(body)
                    if not line.endswith(b"\n") or stated != expected.encode():
                        if line.endswith(b"\n"):
                            print_status(
                                f"{self.path}: line {number + 1} is damaged; what follows it is prepared again"
                            )
                        break
                    yield json.loads(body)
                    self._hash = expected
                    kept += len(line)
        finally:
            os.truncate(self.path, kept)

    def append(self, entry: dict[str, Any]) -> None:
        """Add an entry and flush it to disk."""
        body = json.dumps(entry).encode() + b"\n"
        self._hash = self._chain(body)
        with self.path.open("ab") as file:
            file.write(self._hash.encode() + b" " + body)
            file.flush()
            os.fsync(file.fileno())

    def _chain(self, body: bytes) -> str:
        return hash_bytes(self._hash.encode() + body)
