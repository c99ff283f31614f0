"""The files of a published dataset: in a folder, in its official subfolder, or in the official tar."""

import bz2
import gzip
import hashlib
import io
import lzma
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from widemix.errors import InputError
from widemix.files import open_regular, read_regular
from widemix.progress_line import print_status

GZIP = b"\x1f\x8b"  # the first bytes of a compressed file
MOST = 512 << 20  # bytes of a file of CIFAR or MNIST; the largest has 155 MB
MOST_UNPACKED = 2 << 30  # bytes of an archive, or of a text
UNPACKERS: dict[bytes, Any] = {GZIP: gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}  # by the first bytes
FileException = dict[str, str]  # an entry of the manifest's exceptions: {"file", "rule"}


class Layout(NamedTuple):
    """One published form of a dataset."""

    folder: str  # official name of the folder with the files, or ""
    archive: str  # name of the tar, or ""
    files: Mapping[str, str]  # name -> official MD5, or "" where none is known
    archive_md5: str = ""


class Unpacked(io.RawIOBase):
    """The bytes of a file, decompressed if it is compressed: at most so many, then reading raises `OSError`.

    most: 0 for `MOST_UNPACKED`.
    """

    def __init__(self, file: BinaryIO, most: int = 0) -> None:
        begins, self.left, self.most = file.read(2), most or MOST_UNPACKED, most or MOST_UNPACKED
        file.seek(0)
        self.file: Any = UNPACKERS[begins](file) if begins in UNPACKERS else file

    def readable(self) -> bool:
        """Whether it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read at most so many bytes; returns how many."""
        data = self.file.read(min(len(buffer), 1 << 20))
        self.left -= len(data)
        if self.left < 0:
            raise OSError(f"it unpacks to more than {self.most:,} bytes, the most that such a file can need")
        buffer[: len(data)] = data
        return len(data)


def unpack(data: bytes, most: int = 0) -> bytes:
    """The data, decompressed if they are compressed. Raises errors of many types, `OSError` if there are more."""
    return Unpacked(io.BytesIO(data), most).read()


def read_files(origin: Path, layouts: Sequence[Layout]) -> tuple[Layout, dict[str, bytes], tuple[FileException, ...]]:
    """The first of the layouts found at `origin`, its files' bytes, and an exception for each unofficial file.

    Raises `InputError` if there is none, or one is incomplete.
    """
    for layout in layouts:
        archive = origin if origin.is_file() else origin / layout.archive
        places = (origin, origin / layout.folder)
        for place in places:
            if any((place / name).is_file() for name in layout.files):
                files = {name: _read(place / name) for name in layout.files}
                return layout, files, warn_of(_md5_exceptions(files, layout.files))
        if layout.archive and archive.is_file():
            members = _untar(archive, layout)
            if members is not None:
                exceptions = check_md5(archive, layout.archive_md5) if layout.archive_md5 else ()
                return layout, members, warn_of(_md5_exceptions(members, layout.files) + exceptions)
    forms = "; or ".join(", ".join(layout.files) for layout in layouts)
    tars = ", ".join(layout.archive for layout in layouts if layout.archive)
    raise InputError(f"{origin}: holds none of the files {forms}" + (f"; nor {tars}" if tars else ""))


def check_labels(name: object, values: Any, least: int, most: int) -> np.ndarray:
    """Labels as int64 [n]. Raises `InputError` unless they are a list of whole numbers of `least` to `most`."""
    try:
        labels = np.asarray(values)
        good = labels.ndim == 1 and labels.size > 0 and labels.dtype.kind in "iuf"
        good = good and bool(((labels >= least) & (labels <= most) & (labels == np.rint(labels))).all())
    except (ValueError, TypeError, OverflowError):  # lists of several lengths, numbers of any size
        good = False
    if not good:
        raise InputError(f"{name}: has labels that are not whole numbers of {least} to {most}; download it again")
    return labels.astype(np.int64)


def find_file(origin: Path, folder: str, name: str) -> Path | None:
    """The path of the file `name` in `origin` or in its subfolder `folder`, or None."""
    return next((place / name for place in (origin, origin / folder) if (place / name).is_file()), None)


def warn_of(exceptions: tuple[FileException, ...]) -> tuple[FileException, ...]:
    """Warn of unofficial files, in one line; returns them, of which the manifest has a list."""
    if exceptions:
        first, *others = exceptions
        more = f", and {len(others)} other files are not either" if others else ""
        print_status(f"warning: {first['file']}: {first['rule']}{more}; read all the same")
    return exceptions


def check_md5(path: Path, official: str) -> tuple[FileException, ...]:
    """An exception unless the file has the official MD5. Files of any size; read in pieces."""
    with open_regular(path) as file:
        return _md5_exception(path.name, hashlib.file_digest(file, _md5).hexdigest(), official)


def _md5(data: bytes = b""):
    return hashlib.md5(data, usedforsecurity=False)  # FIPS systems forbid MD5 for security


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, MOST)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); all files of the dataset are needed") from None


def read_member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """The bytes of a regular file in a tar. Raises `tarfile.ReadError` if a few may stand for any number."""
    if member.issparse():
        raise tarfile.ReadError(f"{member.name} is sparse")
    body = tar.extractfile(member)
    assert body is not None
    return body.read()


def _untar(archive: Path, layout: Layout) -> dict[str, bytes] | None:
    """The layout's files from a tar, or None if it holds none of them."""
    files: dict[str, bytes] = {}
    try:
        with open_regular(archive) as file, tarfile.open(fileobj=Unpacked(file), mode="r|") as tar:
            for member in tar:
                path = Path(member.name)
                if path.name in layout.files and path.parent.name == layout.folder and member.isfile():
                    files[path.name] = read_member(tar, member)
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise InputError(f"{archive}: cannot be read as a tar ({error}); download it again") from None
    missing = [name for name in layout.files if name not in files]
    if files and missing:
        raise InputError(f"{archive}: lacks {layout.folder}/{missing[0]}; download it again")
    return {name: files[name] for name in layout.files} if files else None


def _md5_exceptions(files: Mapping[str, bytes], official: Mapping[str, str]) -> tuple[FileException, ...]:
    sums = {name: _md5(data).hexdigest() for name, data in files.items() if official.get(name)}
    return tuple(exception for name, md5 in sums.items() for exception in _md5_exception(name, md5, official[name]))


def _md5_exception(name: str, md5: str, official: str) -> tuple[FileException, ...]:
    if md5 == official:
        return ()
    return ({"file": name, "rule": f"not the official file: MD5 {md5} instead of {official}"},)
