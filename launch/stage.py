"""Copies a prepared folder to a node's own disk: once per node, verified, and reused by later jobs.

The folder may be at a URL. Its manifest is read first; blocks are compared with the hashes in it as they come.
"""

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
from blake3 import blake3

from widemix.data_prep import remote
from widemix.data_prep.remote import Remote, open_remote
from widemix.data_prep.samples import FileSlice
from widemix.errors import InputError
from widemix.files import (
    advise,
    atomic_write,
    check_ours,
    fsync_path,
    open_to_write,
    private_folder,
    real_path,
    refuse_links,
    try_lock,
    wait_for_lock,
)
from widemix.formats.chunks import CHUNK, HASH, PIECE, hash_bytes, hash_chunk, hash_chunks, map_chunks
from widemix.formats.manifest import NAME, Manifest, Split, manifest_json, read_manifest, split_path
from widemix.launch.relay import Neighbour, Relay
from widemix.progress_line import print_status, track

RELAY_THREADS = 4
_COPY = re.compile(r".+-[0-9a-f]{16}(\.unfinished)?")


class Folder(NamedTuple):
    """A prepared folder on a file system."""

    path: Path

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return the bytes from `begin` to `end` of a file, by default all."""
        return FileSlice(str(self.path / name), begin, -1 if end is None else end - begin).read()


def stage(folder: Path | str, local: Path, relay: Relay | None = None) -> Path:
    """Return the path of the folder's copy in `local`, or in `private_folder` of it. A str is a URL.

    All processes of a node may call this at once: the first one copies, the others wait. The copy's name contains a
    hash of its manifest, so that other data get another copy. It appears whole, and each block has been checked
    against the manifest's hash. An existing copy is read and checked too, and its damaged blocks are copied again. An
    interrupted copy is resumed. With `relay` its blocks are read from another node, and served to a third one.
    Raises `InputError` if the disk has too little space, the source is damaged, or another user has made the copy.
    """
    source = Folder(folder) if isinstance(folder, Path) else open_remote(folder)
    manifest = _read_manifest(source)
    if local.exists() and not local.is_dir():
        raise InputError(f"{local}: is a file, not a folder to copy to")
    if isinstance(folder, Path) and real_path(local).is_relative_to(folder.resolve()):
        raise InputError(f"{local}: is in the folder that is to be copied; name one on the node's own disk")
    text = manifest_json(manifest)
    name = Path(folder.resolve() if isinstance(folder, Path) else folder.rstrip("/")).name
    copy = local / f"{name}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    try:
        copy = private_folder(local) / copy.name
        lock = copy.with_name(f".{copy.name}.lock")
        with _locked(lock):
            os.utime(lock)  # `remove_old` goes by it
            if _is_intact(copy, manifest):
                print_status(f"{copy}: already there")
                if relay:
                    _serve(copy, manifest, relay)
            else:
                _copy(source, copy, manifest, text, relay)
    except OSError as error:
        raise InputError(f"{folder} cannot be copied to {copy} ({error.strerror})") from None
    return copy


def remove_old(local: Path, days: float) -> list[Path]:
    """Remove our copies in `local` that have not been staged for so many days; returns them, unfinished ones too.

    Copies are what `stage` has a lock file for. One that is being staged, or that a process of this node has open,
    stays. Raises `InputError` if a file cannot be removed.
    """
    removed = []
    local = private_folder(local) if local.exists() else local
    for lock in sorted(local.glob(".*.lock")):
        name = lock.name.removeprefix(".").removesuffix(".lock")
        if not _COPY.fullmatch(name) or time.time() - lock.stat().st_mtime < days * 86400:
            continue
        with open_to_write(lock, "a") as file:
            if try_lock(file.fileno()) is False:
                continue
            for place in (local / name, local / f"{name}.unfinished"):
                if not place.is_dir() or place.is_symlink() or _is_open(place):
                    continue
                try:
                    shutil.rmtree(place)
                except OSError as error:
                    raise InputError(f"{place}: cannot be removed ({error.strerror})") from None
                removed.append(place)
    return removed


def _is_open(folder: Path) -> bool:
    """Whether a process of this node, as far as we may look into it, has a file of the folder open or mapped."""
    inside = f"{folder.resolve()}/"
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            paths = [file.path for file in process.open_files()] + [file.path for file in process.memory_maps()]
            if any(path.startswith(inside) for path in paths):
                return True
    return False


def _read_manifest(source: Folder | Remote) -> Manifest:
    """Return the manifest of a folder; raises `InputError` if it is damaged, or files on disk have other sizes."""
    if isinstance(source, Folder):
        manifest = read_manifest(source.path)
        for name in manifest.splits:
            split_path(source.path, name, manifest)
        return manifest
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / NAME).write_bytes(source.read(NAME))
        try:
            return read_manifest(Path(name))
        except InputError as error:
            raise InputError(str(error).replace(name, source.url)) from None


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Hold a lock file, after waiting for other processes. The kernel releases it if its holder is killed."""
    with open_to_write(lock, "a") as file:
        if try_lock(file.fileno()) is False:
            print_status(f"{lock}: waiting for the process that copies")
            wait_for_lock(file.fileno())
        yield


def _is_intact(copy: Path, manifest: Manifest) -> bool:
    """Whether there is a copy with the content that the manifest states. Raises `InputError` if it is not ours."""
    if os.path.lexists(copy):
        check_ours(copy)
    if not (copy / NAME).exists():
        return False
    try:
        copied = read_manifest(copy)
        paths = {name: split_path(copy, name, manifest) for name in manifest.splits}
        if copied != manifest:
            raise InputError(f"{copy / NAME}: differs from that of the source")
        for name, path in paths.items():
            if hash_chunks(path) != manifest.splits[name].blocks:
                raise InputError(f"{path}: is damaged")
        for name, digest in manifest.files.items():
            if hash_bytes(FileSlice(str(copy / name)).read()) != digest:
                raise InputError(f"{copy / name}: is damaged")
    except InputError as error:
        print_status(f"{error}; what is damaged is copied again")
        return False
    return True


def _copy(source: Folder | Remote, copy: Path, manifest: Manifest, text: str, relay: Relay | None) -> None:
    """Copy to a temporary folder next to it, verify that, and rename it."""
    unfinished = copy.with_name(f"{copy.name}.unfinished")
    if copy.exists():  # a file of it was damaged or removed
        copy.rename(unfinished)
    unfinished.mkdir(0o755, exist_ok=True)
    check_ours(unfinished)
    refuse_links(unfinished)
    copied = sum(path.stat().st_blocks * 512 for path in unfinished.iterdir())
    needed = sum(split.bytes for split in manifest.splits.values()) - copied
    free = shutil.disk_usage(unfinished).free
    if needed > free:
        sizes = f"{free / 2**20:,.0f} MiB free, a copy of {_where(source)} needs {needed / 2**20:,.0f}"
        others = any(_COPY.fullmatch(path.name) for path in copy.parent.iterdir() if path != unfinished)
        cure = f"; `widemix stage --to {copy.parent} --clean 7` removes copies not used for 7 days" if others else ""
        raise InputError(f"{copy.parent}: has {sizes}{cure}")
    neighbour = f"{relay.neighbour.address}, and from " if relay and relay.neighbour else ""
    print_status(f"{copy}: copying from {neighbour}{_where(source)}")
    for name, split in manifest.splits.items():
        _copy_split(source, unfinished / split.file, name, split, relay)
    for name, digest in manifest.files.items():
        data = source.read(name)
        if hash_bytes(data) != digest:
            raise InputError(f"{_where(source)}/{name}: is damaged; prepare the folder again")
        atomic_write(unfinished / name, data)
    atomic_write(unfinished / NAME, text)
    unfinished.rename(copy)
    fsync_path(copy.parent)


def _where(source: Folder | Remote) -> str:
    return str(source.path) if isinstance(source, Folder) else source.url


def _copy_split(source: Folder | Remote, target: Path, name: str, split: Split, relay: Relay | None) -> None:
    with target.open("r+b" if target.exists() else "w+b") as file:
        file.truncate(split.bytes)
        count = len(split.blocks)
        if relay:
            relay.add_file(split.file, file.fileno())

        def copy(block: int) -> None:
            _copy_block(source, target, file.fileno(), block, split, relay.neighbour if relay else None)
            if relay:
                relay.add_blocks(split.file, range(block, block + 1))

        # Few blocks at a time, since each is handed on when it is whole.
        with map_chunks(copy, count, RELAY_THREADS if relay else None) as copied:
            for _ in track(copied, name, count, "blocks"):
                pass
        os.fsync(file.fileno())
        advise(file.fileno(), 0, 0, "DONTNEED")  # so that the check reads the disk
    if hash_chunks(target) != split.blocks:
        raise InputError(f"{target}: differs from what was written to it; the disk is failing, use another one")


def _copy_block(
    source: Folder | Remote, target: Path, descriptor: int, block: int, split: Split, neighbour: Neighbour | None
) -> None:
    """Copy a block unless an interrupted process has copied it. Raises `InputError` if the source is damaged."""
    wanted = split.blocks[block]
    if hash_chunk(target, block) == wanted:
        return
    if neighbour and not neighbour.lost:
        try:
            if _transfer(neighbour, descriptor, block, split) == wanted:
                return
            reason = f"its block {block} of {split.file} is damaged"
        except OSError as error:
            reason = error.strerror or str(error)
        neighbour.lost = True
        print_status(f"{neighbour.address}: {reason}; what is missing is read from {_where(source)}")
    if _transfer(source, descriptor, block, split) != wanted:
        where = f"{_where(source)}/{split.file}"
        raise InputError(f"{where}: block {block} is damaged; `widemix verify` says which samples")


def _transfer(source: Folder | Remote | Neighbour, descriptor: int, block: int, split: Split) -> str:
    """Write a block of the source, and return its hash."""
    digest, size = blake3(), remote.PIECE if isinstance(source, Remote) else PIECE
    begin = block * CHUNK
    end = min(begin + CHUNK, split.bytes)
    for start in range(begin, end, size):
        piece = source.read(split.file, start, min(start + size, end))
        digest.update(piece)
        os.pwrite(descriptor, piece, start)
    return digest.hexdigest(length=HASH)


def _serve(copy: Path, manifest: Manifest, relay: Relay) -> None:
    """Serve a copy that is complete."""
    for split in manifest.splits.values():
        with (copy / split.file).open("rb") as file:
            relay.add_file(split.file, file.fileno())
        relay.add_blocks(split.file, range(len(split.blocks)))
