"""Files that others may read at any moment."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """A file that appears whole or not at all."""
    shadow = path.with_name(f".{path.name}")
    try:
        with shadow.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        shadow.unlink(missing_ok=True)
        raise
    shadow.replace(path)
