"""The Python environment on each node's own disk: packed once, unpacked by one reader a node.

Importing torch and what else a rank imports takes tens of thousands of file operations, which 128 ranks ask of the
metadata server of a shared file system at once. An archive is one file, read from begin to end.
"""

import os
import re
import shutil
import sys
import tarfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from widemix.errors import InputError
from widemix.files import check_ours, fsync_path, private_folder, wait_for_lock
from widemix.progress_line import print_status

_PIECE = 4 << 20
_INTERPRETER = re.compile(r"(\./)?bin/python[\w.-]*")


class _Hashed:
    """Write to a file, and hash what is written."""

    def __init__(self, file: BinaryIO):
        self._file, self.digest, self.bytes = file, blake3(), 0

    def write(self, data: bytes) -> int:
        """Write and hash; returns the number of bytes."""
        self.digest.update(data)
        self.bytes += len(data)
        return self._file.write(data)

    def name(self) -> str:
        """Return the archive's name, which has the hash."""
        return f"environment-{self.digest.hexdigest(length=8)}-{self.bytes}.tar"


def pack(folder: Path, prefix: Path = Path(sys.prefix)) -> Path:
    """Pack a virtual or conda environment into an archive in `folder`, and return its path. Raises `InputError`."""
    if not (prefix / "pyvenv.cfg").exists() and not (prefix / "conda-meta").is_dir():
        raise InputError(f"{prefix}: is neither a virtual nor a conda environment; run widemix from one")
    unfinished = folder / f".environment-{os.getpid()}.unfinished"
    print_status(f"{folder}: packing {prefix}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            hashed = _Hashed(file)
            with tarfile.open(fileobj=hashed, mode="w|") as archive:  # type: ignore[call-overload]
                archive.add(prefix, arcname=".", filter=partial(_checked, folder=prefix))
            file.flush()
            os.fsync(file.fileno())
        return unfinished.rename(folder / hashed.name())
    except OSError as error:
        raise InputError(f"{prefix} cannot be packed into {folder} ({error.strerror})") from None
    except tarfile.FilterError as error:
        raise InputError(f"{prefix} cannot be packed ({error}); replace it by what it leads to") from None
    finally:
        with suppress(OSError):  # of a folder that there can't be
            unfinished.unlink(missing_ok=True)


def unpack(archive: Path, local: Path) -> Path:
    """Unpack what `pack` has written below `local`, and return the environment's folder, which appears whole.

    All processes of a node may call this at once; one that is there is used again. Raises `InputError` if the
    archive's content is not that in its name, the disk has too little space, or another user could write there.
    """
    place = local / archive.stem
    try:
        local = private_folder(local, code=True)
        place = local / archive.stem
        with (local / f".{archive.stem}.lock").open("a") as lock:
            wait_for_lock(lock.fileno())
            if not os.path.lexists(place):
                _unpack(archive, place)
            check_ours(place)
    except (OSError, tarfile.TarError) as error:
        raise InputError(f"{archive} cannot be unpacked to {place} ({error})") from None
    return place


def _unpack(archive: Path, place: Path) -> None:
    """Copy the archive to the node's disk, which reads it once, and unpack the copy if it has the right hash."""
    unfinished, copy = (place.with_name(f"{place.name}.{what}") for what in ("unfinished", "tar.unfinished"))
    shutil.rmtree(unfinished, ignore_errors=True)
    print_status(f"{place}: unpacking {archive}")
    try:
        with archive.open("rb") as source, copy.open("wb") as target:
            hashed = _Hashed(target)
            while piece := source.read(_PIECE):
                hashed.write(piece)
        if hashed.name() != archive.name:
            raise InputError(f"{archive}: is damaged, or has another name than `widemix stage --environment` gave it")
        unfinished.mkdir(0o755)
        with tarfile.open(copy, "r:") as members:
            members.extractall(unfinished, filter=_inside)
        unfinished.rename(place)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    finally:
        copy.unlink(missing_ok=True)
    fsync_path(place.parent)


def _inside(member: tarfile.TarInfo, folder: str | Path) -> tarfile.TarInfo:
    """Return a member as tarfile's data filter does; raises an error for what would be, or lead, out of `folder`.

    The interpreter of a virtual environment alone is a link to that of the system. Nothing is written through it.
    """
    if member.issym() and _INTERPRETER.fullmatch(member.name):
        return member.replace(uid=None, gid=None, uname=None, gname=None, deep=False)  # type: ignore[arg-type]
    return tarfile.data_filter(member, str(folder))


def _checked(member: tarfile.TarInfo, folder: Path) -> tarfile.TarInfo:
    """Return the member itself, if it can be unpacked."""
    _inside(member, folder)
    return member
