"""The Python environment on each node's own disk: packed once, unpacked by one reader a node.

Importing torch and what else a rank imports takes tens of thousands of file operations, which 128 ranks ask of the
metadata server of a shared file system at once. An archive is one file, read from begin to end.
"""

import fcntl
import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from data_prep.progress import print_status
from pipeline.errors import InputError
from pipeline.files import fsync_path

_PIECE = 4 << 20


class _Hashed:
    """A file of which everything that is read or written is hashed."""

    def __init__(self, file: BinaryIO):
        self._file, self.digest, self.bytes = file, blake3(), 0

    def read(self, size: int) -> bytes:
        """As a file's."""
        return self._add(self._file.read(size))

    def write(self, data: bytes) -> int:
        """As a file's."""
        return self._file.write(self._add(data))

    def _add(self, data: bytes) -> bytes:
        self.digest.update(data)
        self.bytes += len(data)
        return data

    def name(self) -> str:
        """The archive's name, which has the hash."""
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
                archive.add(prefix, arcname=".")
            file.flush()
            os.fsync(file.fileno())
        return unfinished.rename(folder / hashed.name())
    except OSError as error:
        raise InputError(f"{prefix} cannot be packed into {folder} ({error.strerror})") from None
    finally:
        unfinished.unlink(missing_ok=True)


def unpack(archive: Path, local: Path) -> Path:
    """Unpack what `pack` has written below `local`, and return the environment's folder, which appears whole.

    All processes of a node may call this at once; one that is there is used again. Raises `InputError` if the
    archive's content is not that in its name, or the disk has too little space.
    """
    place = local / archive.stem
    try:
        local.mkdir(parents=True, exist_ok=True)
        with (local / f".{archive.stem}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                _unpack(archive, place)
    except (OSError, tarfile.TarError) as error:
        raise InputError(f"{archive} cannot be unpacked to {place} ({error})") from None
    return place


def _unpack(archive: Path, place: Path) -> None:
    unfinished = place.with_name(f"{place.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    print_status(f"{place}: unpacking {archive}")
    with archive.open("rb") as file:
        hashed = _Hashed(file)
        with tarfile.open(fileobj=hashed, mode="r|") as members:  # type: ignore[call-overload]
            members.extractall(unfinished, filter="fully_trusted")
        while hashed.read(_PIECE):  # what follows the last member
            pass
    if hashed.name() != archive.name:
        shutil.rmtree(unfinished)
        raise InputError(f"{archive}: is damaged, or has another name than `widemix stage --environment` gave it")
    unfinished.rename(place)
    fsync_path(place.parent)
