"""A record of which parts of an unfinished .beton are on disk, so that a later process can resume."""

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from widemix.files import open_regular
from widemix.formats.blocks import hash_bytes
from widemix.tally import print_status


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
