"""Files that others may read at any moment."""

import errno
import fcntl
import os
from pathlib import Path

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # some network file systems, Lustre unless told to


def atomic_write(path: Path, text: str) -> None:
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


def fsync_path(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed; whether it is ours. Where the file system has no locks, it is."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
