"""What of an unfinished .beton is safely on disk, so that a later process goes on from there."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    """JSON lines, one a shard, each flushed to disk after the data that it tells of.

    A line that was cut short by a kill or a crash, and all after it, is as if it had never been written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> Iterator[dict[str, Any]]:
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

    def rewind(self, lines: int) -> None:
        """Forget all but the first lines."""
        if self.path.exists():
            kept = b"".join(self.path.read_bytes().splitlines(keepends=True)[:lines])
            os.truncate(self.path, len(kept))

    def append(self, entry: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
