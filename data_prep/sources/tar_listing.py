"""The members of plain tars, listed once: the list is kept in the user's cache folder while the tar is the same.

Listing a tar reads a block at each member, which takes minutes over a network for ImageNet's 138 GB; a preparation
that is estimated, interrupted and resumed would pay for it each time.
"""

import hashlib
import io
import os
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import numpy as np

from widemix.data_prep.samples import FileSlice
from widemix.data_prep.sources.listing import is_hidden_path
from widemix.errors import InputError
from widemix.files import atomic_write, open_regular
from widemix.native.build import cache_folder

COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")  # the first bytes: gzip, bzip2, xz, zstd
FORM = 2  # of the lists that are kept; those of another are made again


class Members(NamedTuple):
    """The files in a tar that are not hidden, in its order; those of a tar in it have the name `INNER.tar/NAME`."""

    names: np.ndarray  # bytes [n], UTF-8
    offsets: np.ndarray  # int64 [n], bytes from the start of the outer tar
    sizes: np.ndarray  # int64 [n], bytes

    def name(self, number: int) -> str:
        """The name of a member."""
        return self.names[number].decode("utf-8", "surrogateescape")


def list_tar(path: Path, nested: bool = False) -> Members:
    """The members of an uncompressed tar, with `nested` also of the tars in it.

    Raises `InputError` if the tar is damaged or cut short.
    """
    FileSlice(str(path), size=0).read()  # it is a regular file
    kept = _kept(path, nested)
    try:
        with kept.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return Members(*(arrays[name] for name in Members._fields))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # not listed yet, or damaged
    check_end(path)
    try:
        listed = list(_nested(path) if nested else _flat(path))
    except InputError:
        raise
    except Exception as error:  # tarfile raises many types
        raise InputError(
            f"{path}: cannot be read as an uncompressed tar ({shorten(str(error), 100)}); download it again"
        ) from None
    names, offsets, sizes = zip(*listed, strict=True) if listed else ((), (), ())
    encoded = [name.encode("utf-8", "surrogateescape") for name in names]
    members = Members(np.array(encoded, np.bytes_), np.array(offsets, np.int64), np.array(sizes, np.int64))
    content = io.BytesIO()
    np.savez(content, **members._asdict())
    atomic_write(kept, content.getvalue())
    return members


def check_end(tar: Path) -> None:
    """Raise `InputError` for a tar that is compressed or cut short: it lacks the two blocks of zeros at the end.

    `tarfile` would read it as a smaller tar.
    """
    with open_regular(tar) as file:
        if file.read(6).startswith(COMPRESSED):
            raise InputError(f"{tar}: is compressed; decompress it, since files are read in place")
        file.seek(max(0, tar.stat().st_size - 1024))
        if file.read() != bytes(1024):
            raise InputError(f"{tar}: is cut short; download it again")


def _kept(path: Path, nested: bool) -> Path:
    status = os.stat(path)
    same = (os.path.realpath(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, nested, FORM)
    return cache_folder() / f"tar-{hashlib.sha256(repr(same).encode()).hexdigest()[:32]}.npz"


def _flat(path: Path) -> Iterator[tuple[str, int, int]]:
    with tarfile.open(path, "r:") as tar:
        yield from _files(path, tar)


def _nested(path: Path) -> Iterator[tuple[str, int, int]]:
    with tarfile.open(path, "r:") as outer:
        for part in outer:
            if not part.name.endswith(".tar") or part.isdir() or is_hidden_path(part.name):
                continue
            inner = outer.extractfile(part) if part.isfile() else None
            if inner is None:
                raise tarfile.ReadError(f"{part.name} is no regular file")
            with tarfile.open(fileobj=inner, mode="r:") as tar:
                for name, offset, size in _files(path, tar):
                    yield f"{part.name}/{name}", part.offset_data + offset, size


def _files(path: Path, tar: tarfile.TarFile) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each file that is not hidden; a hard link has the place of what it links to.

    Raises `InputError` for what holds no data of its own: a symbolic link, a sparse file.
    """
    places: dict[str, tuple[int, int]] = {}
    for member in tar:
        tar.members = []  # type: ignore[attr-defined]  # which tarfile keeps: a kilobyte of each member
        if member.issym() or member.issparse() or (member.islnk() and member.linkname not in places):
            if not is_hidden_path(member.name):
                raise InputError(
                    f"{path}: {member.name} is a link or sparse; pack it with `tar --hard-dereference -h`"
                )
        elif member.isfile() or member.islnk():
            place = places[member.linkname] if member.islnk() else (member.offset_data, member.size)
            places[member.name] = place
            if not is_hidden_path(member.name):
                yield member.name, *place
