"""The files of a published dataset, wherever people have them: in a folder, a folder below it, or the tar."""

import hashlib
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from data_prep.progress import say
from pipeline.errors import InputError

Note = dict[str, str]  # an entry of the manifest's exceptions


class Layout(NamedTuple):
    """One published form of a dataset."""

    folder: str  # that the files lie in, below the place that is named, or ""
    archive: str  # name of the tar, or ""
    files: Mapping[str, str]  # name -> official MD5, or "" where none is known
    archive_md5: str = ""


def read_files(origin: Path, layouts: Sequence[Layout]) -> tuple[Layout, dict[str, bytes], tuple[Note, ...]]:
    """The first layout found at `origin`, its files' bytes, and a note for each that is not the official one."""
    for layout in layouts:
        archive = origin if origin.is_file() else origin / layout.archive
        places = (origin, origin / layout.folder)
        for place in places:
            if any((place / name).is_file() for name in layout.files):
                files = {name: _read(place / name) for name in layout.files}
                return layout, files, _notes(files, layout.files)
        if layout.archive and archive.is_file():
            members = _untar(archive, layout)
            if members is not None:
                notes = check_md5(archive, layout.archive_md5) if layout.archive_md5 else ()
                return layout, members, _notes(members, layout.files) + notes
    forms = "; or ".join(", ".join(layout.files) for layout in layouts)
    tars = ", ".join(layout.archive for layout in layouts if layout.archive)
    raise InputError(f"{origin}: holds none of the files {forms}" + (f"; nor {tars}" if tars else ""))


def find_file(origin: Path, folder: str, name: str) -> Path | None:
    """The file `name` in `origin` or in its subfolder, if there is one."""
    return next((place / name for place in (origin, origin / folder) if (place / name).is_file()), None)


def check_md5(path: Path, official: str) -> tuple[Note, ...]:
    """A note unless the file, of any size, is the official one."""
    with path.open("rb") as file:
        return _note(path.name, hashlib.file_digest(file, _md5).hexdigest(), official)


def _md5(data: bytes = b""):
    return hashlib.md5(data, usedforsecurity=False)  # some systems forbid it for security


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); every file of the set is needed") from None


def _untar(archive: Path, layout: Layout) -> dict[str, bytes] | None:
    """The layout's files out of a tar, or None when it holds none of them."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                path = Path(member.name)
                if path.name in layout.files and path.parent.name == layout.folder and member.isfile():
                    body = tar.extractfile(member)
                    assert body is not None
                    files[path.name] = body.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise InputError(f"{archive}: cannot be read as a tar ({error}); fetch it again") from None
    missing = [name for name in layout.files if name not in files]
    if files and missing:
        raise InputError(f"{archive}: lacks {layout.folder}/{missing[0]}; fetch it again")
    return {name: files[name] for name in layout.files} if files else None


def _notes(files: Mapping[str, bytes], official: Mapping[str, str]) -> tuple[Note, ...]:
    sums = {name: _md5(data).hexdigest() for name, data in files.items() if official.get(name)}
    return tuple(note for name, found in sums.items() for note in _note(name, found, official[name]))


def _note(name: str, found: str, official: str) -> tuple[Note, ...]:
    if found == official:
        return ()
    rule = f"MD5 {found}, where the official file has {official}"
    say(f"{name}: {rule}; read as it is")
    return ({"file": name, "rule": rule},)
