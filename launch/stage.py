"""A prepared folder copied to a node's own disk: once a node, verified, and reused by whoever comes next."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from data_prep.progress import progress, say
from data_prep.samples import FileSlice
from pipeline.errors import InputError
from pipeline.files import atomic_write, fsync_path, try_lock
from pipeline.formats.blocks import BLOCK, HASH, PIECE, hash_block, hash_blocks, hash_bytes, of_blocks
from pipeline.formats.manifest import NAME, Manifest, Split, manifest_json, read_manifest, split_path


def stage(folder: Path, local: Path) -> Path:
    """The folder's copy under `local`, made if it is not there yet; every process of a node may call this at once.

    The first one copies, the others wait for it. The copy is named by its content, so that jobs with other data do
    not meet it; it appears whole, every block equal to the manifest's hash. An interrupted one is gone on with.
    Raises `InputError` when the disk has too little room or the source is damaged.
    """
    manifest = read_manifest(folder)
    for name in manifest.splits:
        split_path(folder, name, manifest)
    if local.exists() and not local.is_dir():
        raise InputError(f"{local}: is a file, not a folder to copy to")
    text = manifest_json(manifest)
    copy = local / f"{folder.resolve().name}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    try:
        local.mkdir(parents=True, exist_ok=True)
        with _alone(local / f".{copy.name}.lock"):
            if _is_whole(copy, manifest):
                say(f"{copy}: already there")
            else:
                _copy(folder, copy, manifest, text)
    except OSError as error:
        raise InputError(f"{folder} cannot be copied to {copy} ({error.strerror})") from None
    return copy


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until no other process of this node holds the lock. The kernel frees it when a holder is killed."""
    with lock.open("a") as file:
        if not try_lock(file.fileno()):
            say(f"{lock}: waiting for the process that copies")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_whole(copy: Path, manifest: Manifest) -> bool:
    try:
        found = read_manifest(copy)
        for name in manifest.splits:
            split_path(copy, name, manifest)
        if not all((copy / name).is_file() for name in manifest.files):
            return False
    except InputError:
        return False
    return found == manifest


def _copy(folder: Path, copy: Path, manifest: Manifest, text: str) -> None:
    """Copy to a folder beside, verify there, and rename it."""
    beside = copy.with_name(f"{copy.name}.unfinished")
    if copy.exists():  # somebody cut a file of it short
        copy.rename(beside)
    beside.mkdir(exist_ok=True)
    there = sum(path.stat().st_blocks * 512 for path in beside.iterdir())
    needed = sum(split.bytes for split in manifest.splits.values()) - there
    free = shutil.disk_usage(beside).free
    if needed > free:
        sizes = f"{free / 2**20:,.0f} MiB free, a copy of {folder} needs {needed / 2**20:,.0f}"
        raise InputError(f"{copy.parent}: has {sizes}")
    say(f"{copy}: copying from {folder}")
    for name, split in manifest.splits.items():
        _copy_split(folder / split.file, beside / split.file, name, split)
    for name, digest in manifest.files.items():
        data = FileSlice(str(folder / name)).read()
        if hash_bytes(data) != digest:
            raise InputError(f"{folder / name}: is damaged; prepare the folder again")
        atomic_write(beside / name, data)
    atomic_write(beside / NAME, text)
    beside.rename(copy)
    fsync_path(copy.parent)


def _copy_split(source: Path, target: Path, name: str, split: Split) -> None:
    with target.open("r+b" if target.exists() else "w+b") as file:
        file.truncate(split.bytes)
        count = len(split.blocks)
        with of_blocks(lambda block: _copy_block(source, target, file.fileno(), block, split), count) as copied:
            for _ in progress(copied, count, name, "blocks"):
                pass
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what is verified comes from the disk
    if hash_blocks(target) != split.blocks:
        raise InputError(f"{target}: differs from what was written to it; the disk is failing, stage to another")


def _copy_block(source: Path, target: Path, descriptor: int, block: int, split: Split) -> None:
    """Copy a block unless an earlier process has; `InputError` where the source's is damaged."""
    wanted, place = split.blocks[block], block * BLOCK
    if hash_block(target, block) == wanted:
        return
    digest = blake3()
    with source.open("rb") as file:
        file.seek(place)
        for start in range(place, min(place + BLOCK, split.bytes), PIECE):
            piece = file.read(min(PIECE, place + BLOCK - start))
            digest.update(piece)
            os.pwrite(descriptor, piece, start)
    if digest.hexdigest(length=HASH) != wanted:
        raise InputError(f"{source}: block {block} is damaged; `widemix verify {source.parent}` says which samples")
