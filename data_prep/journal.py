"""A record of which parts of an unfinished .beton are on disk, so that a later process can resume."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    """JSON lines, one per shard, each flushed to disk after the data that it describes.

    A line that a kill or a crash cut short is ignored, and so is everything after it.
    """

    def __init__(self, path: Path) -> None:
        """The journal at `path`, which need not exist."""
        self.path = path

    def entries(self) -> Iterator[dict[str, Any]]:
        """The complete entries, in the order in which they were appended."""
        if not self.path.exists():
            return
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                entry = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                entry = None
            if entry is None:
                return
            yield entry

    def truncate(self, entries: int) -> None:
        """Remove all but the first entries."""
        if self.path.exists():
            kept = b"".join(self.path.read_bytes().splitlines(keepends=True)[:entries])
            os.truncate(self.path, len(kept))

    def append(self, entry: dict[str, Any]) -> None:
        """Add an entry and flush it to disk."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
