"""An unfinished .beton on disk: threads that write, hash and flush it, and the journal of what is there."""

import json
import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from widemix.files import advise, open_regular, open_to_write
from widemix.formats.chunks import ChunkHashes, hash_bytes
from widemix.progress_line import print_status

MAX_PENDING = 16  # writes and flushes that may wait at a time, which bounds memory


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
