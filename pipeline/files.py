"""Reading files that a user names, writing files that other processes may read at any moment, and locking them."""

import csv
import errno
import io
import json
import os
import re
import stat
import sys
import time
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from widemix.errors import InputError
from widemix.terminal import ANY_TEXT, print

try:
    import fcntl
except ImportError:  # Windows, on which nothing is locked
    fcntl = None  # type: ignore[assignment]

MOST = 4 << 30  # bytes of a file that is read whole, such as the names of a split's samples
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # some network file systems; Lustre without `-o flock`


def open_regular(path: str | Path) -> io.BufferedReader:
    """Open a file that a user has named, to read it. Raises OSError as `open` does, and `InputError` for what is no
    file: a device, or a named pipe, at which reading would wait for a writer.
    """
    without_waiting = getattr(os, "O_NONBLOCK", 0)
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | without_waiting))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise InputError(f"{path}: is not a regular file")
    return file


def read_regular(path: str | Path, most: int = MOST) -> bytes:
    """Return the bytes of such a file; `InputError` if there are more than `most`, more than such a file can need."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= most:
            return file.read(size)  # no more: some files of /proc never end
    raise InputError(f"{path}: has more than {most:,} bytes, the most that such a file can need")


def parse_json(data: str | bytes, **options: Any) -> Any:
    """Return what a JSON text holds; raises `ValueError`, also where it is nested too deeply."""
    try:
        return json.loads(data, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def atomic_write(path: Path, data: str | bytes) -> None:
    """Write a file that appears whole or not at all, and is on disk when this returns. Text is encoded as UTF-8,
    file names in it as they are on disk.

    The data go to `.NAME` in the same folder, which is renamed. A process that is killed may leave that file behind;
    the next write replaces it. Raises `OSError`; the old content then stays. `InputError` where either is a link.
    """
    temporary = path.with_name(f".{path.name}")
    for each in (path, temporary):
        refuse_link(each)
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # not through a link that another user has put there since
            file.write(data.encode(errors=ANY_TEXT) if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:  # Ctrl-C too
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # of a full disk
            error.filename = str(path)
        raise
    fsync_path(path.parent)


def write_output(path: Path, data: str | bytes) -> None:
    """`atomic_write` of a file that a command was asked for; a line on stderr if that had another content."""
    content = data.encode(errors=ANY_TEXT) if isinstance(data, str) else data
    if path.exists() and path.read_bytes() != content:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
        print(f"{path}: replaces the one of {written}", file=sys.stderr)
    atomic_write(path, content)


def is_ours(path: Path, entries: bool = False) -> bool:
    """Whether no other user can write to a file or folder, or put another in its place.

    It and all folders above it, also where links lead, belong to this user or to root; not everybody can write to
    them, but for folders above it with the sticky bit, as /tmp. A group is trusted. entries: say it of what this user
    has in the folder, which may be such a one.
    """
    if not hasattr(os, "geteuid"):  # Windows
        return True
    owners = {os.geteuid(), 0, os.stat("/").st_uid}  # that of / where root has another number, as in some containers
    for place in (Path(os.path.abspath(path)), path.resolve()):
        for each in (place, *place.parents):
            found = each.lstat()
            open_to_all = found.st_mode & stat.S_IWOTH and not stat.S_ISLNK(found.st_mode)
            sticky = found.st_mode & stat.S_ISVTX and (entries or each != place)
            if found.st_uid not in owners or (open_to_all and not sticky):
                return False
    return True


def real_path(path: Path) -> Path:
    """`path.resolve()`, which leaves a loop of links to what opens it; Python 3.11 and 3.12 raise a RuntimeError."""
    return Path(os.path.realpath(path))


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV. A text that spreadsheets compute, such as `=1+1`, gets an apostrophe before it.

    They would run commands and fetch addresses; names of files, classes and recipes may come from strangers.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(_uncomputed, row) for row in rows)
    return text.getvalue()


_NUMBER = re.compile(r"[-+]?(\d[\d,]*\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?(inf|nan)|-", re.I)
_COMPUTED = re.compile(r"(^|[;\t\r\n])(?=[=+@\-\uff1d\uff0b\uff20\uff0d])")  # some take ; as what parts cells


def _uncomputed(cell: object) -> object:
    return cell if not isinstance(cell, str) or _NUMBER.fullmatch(cell) else _COMPUTED.sub(r"\1'", cell)


def refuse_link(path: Path) -> None:
    """Raise `InputError` where a file or folder that is to be written or removed is a link: a folder that someone has
    sent may have one to anything. Also where it is a named pipe or a device, at which writing may wait for ever."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return  # it is not there, which writing it says if it matters
    if stat.S_ISLNK(mode):
        raise InputError(
            f"{path}: is a link to {os.readlink(path)}, and nothing is written or removed through links; put that "
            "itself in its place, or remove the link"
        )
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError(f"{path}: is not a regular file; remove it")


def refuse_links(folder: Path, allowed: str = "") -> None:
    """`refuse_link` of all that is in a folder and below, but what matches the pattern `allowed`, such as wandb/*."""
    for root, folders, files in os.walk(folder):
        for path in (Path(root, name) for name in (*folders, *files)):
            if not fnmatch(str(path.relative_to(folder)), allowed):
                refuse_link(path)


def open_to_write(path: Path, mode: str, buffering: int = -1) -> IO[Any]:
    """Open a file as `Path.open` does; `InputError` where it is a link, or no regular file."""
    refuse_link(path)
    no_link = getattr(os, "O_NOFOLLOW", 0)  # nor one that another user has put there since
    return open(path, mode, buffering, opener=lambda name, flags: os.open(name, flags | no_link, 0o666))


def fsync_path(path: Path) -> None:
    """Flush a file's data, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool | None:
    """Try to lock an open file until it is closed; returns whether this process has the lock.

    False if another process holds it; None if the file system has no locks. Other failures raise `OSError`.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def wait_for_lock(descriptor: int) -> None:
    """Lock an open file until it is closed, after waiting for others. Raises `OSError` where there are no locks."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def private_folder(folder: Path, code: bool = False) -> Path:
    """Return a folder in which no other user can write: this one, which is made if it is not there, or where others
    may write to it or have made it, `widemix-UID` in it, of mode 700.

    A folder's group is trusted. Where others can replace the folder itself, that is `InputError` for code and else a
    line on stderr. Raises `InputError` also where another user has made ours.
    """
    folder.mkdir(0o755, parents=True, exist_ok=True)
    if not hasattr(os, "geteuid"):  # Windows
        return folder
    if not is_ours(folder, entries=True):
        line = f"{folder}: other users can replace what we write there; name a folder of your own, or `chmod +t` it"
        if code:
            raise InputError(line)
        print(f"warning: {line}", file=sys.stderr)
    user, found = os.geteuid(), folder.stat()
    if found.st_uid == user and not found.st_mode & stat.S_IWOTH:
        return folder
    own = folder / f"widemix-{user}"
    own.mkdir(0o700, exist_ok=True)
    return check_ours(own)


def check_ours(folder: Path) -> Path:
    """Return the folder; `InputError` if it is a link, another user's, or others may write to it."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH:
        raise InputError(
            f"{folder}: is not a folder of this user's alone: others may have written what is in it; remove it, "
            "or name another place"
        )
    return folder


def advise(descriptor: int, start: int, size: int, advice: str) -> None:
    """Say that bytes of an open file are WILLNEED or DONTNEED in the page cache; `size` 0 is to its end.

    Nothing happens on systems whose kernel takes no advice.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, size, getattr(os, f"POSIX_FADV_{advice}"))
