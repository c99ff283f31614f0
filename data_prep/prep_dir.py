"""The output folder while it is prepared: locked, resumable, and cleared if there is nothing to resume from.

Files whose names end in `.unfinished` are temporary: each split's data and journal, the lock, and the plan, which
records what is being prepared. manifest.json is written last.
"""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.progress import print_status
from data_prep.settings import rename_old_keys
from pipeline.errors import InputError
from pipeline.files import atomic_write, try_lock
from pipeline.formats.manifest import NAME, Manifest, manifest_json

UNFINISHED = ".unfinished"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise `InputError` in place of a `PermissionError`."""
    try:
        yield
    except PermissionError as error:
        raise InputError(f"{error.filename}: this user has no permission to enter, read or write it") from None


@contextmanager
def prep_dir(to: Path, plan: dict[str, Any], force: bool) -> Iterator[None]:
    """Lock the output folder, and resume an interrupted preparation of the same `plan` if there is one.

    Raises `InputError` if the folder cannot be written to, its disk is full, another process holds the lock, or the
    interrupted preparation has another plan (unless `force`, which starts again). If the block raises, finished
    shards are kept; if there are none, everything that was created is removed.
    """
    missing = [folder for folder in (to, *to.parents) if not folder.exists()]
    try:
        try:
            to.mkdir(parents=True, exist_ok=True)
            lock = (to / f"lock{UNFINISHED}").open("a")
        except OSError as error:
            raise InputError(f"{to}: cannot be written to ({error.strerror})") from None
        with lock:
            _lock(to, lock.fileno())
            try:
                _resume(to, plan, force)
                yield
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                raise InputError(f"{to}: the disk is full; free some space and run the same command again") from None
            finally:
                _keep_or_clear(to)
    finally:
        for folder in missing:
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()


def clear_leftovers(to: Path) -> None:
    """Remove the temporary files of a process that was killed just after it wrote the manifest."""
    if any(to.glob(f"*{UNFINISHED}")) and os.access(to, os.W_OK):
        with (to / f"lock{UNFINISHED}").open("a") as lock:
            _lock(to, lock.fileno())
            _clear(to)


def rename_finished(to: Path, manifest: Manifest) -> None:
    """Give the finished files their names, and write the manifest last: a folder without one is not prepared."""
    (to / NAME).unlink(missing_ok=True)
    for split in manifest.splits.values():
        os.replace(to / f"{split.file}{UNFINISHED}", to / split.file)
    for name in manifest.files:
        os.replace(to / f"{name}{UNFINISHED}", to / name)
    atomic_write(to / NAME, manifest_json(manifest))


def data_path(to: Path, split: str) -> Path:
    """The path of an unfinished split's .beton."""
    return to / f"{split}.beton{UNFINISHED}"


def journal_path(to: Path, split: str) -> Path:
    """The path of an unfinished split's journal."""
    return to / f"{split}.journal{UNFINISHED}"


def _lock(to: Path, descriptor: int) -> None:
    busy = InputError(f"{to}: another process is preparing it; wait until it ends, or name another folder")
    if not try_lock(descriptor):
        raise busy
    path = to / f"lock{UNFINISHED}"
    if not path.exists() or path.stat().st_ino != os.fstat(descriptor).st_ino:  # its holder has just finished
        raise busy


def _resume(to: Path, plan: dict[str, Any], force: bool) -> None:
    path = to / f"plan{UNFINISHED}"
    if path.exists() and any(to.glob(f"*.journal{UNFINISHED}")):
        try:
            earlier = rename_old_keys(json.loads(path.read_text(encoding="utf-8")))
        except ValueError:
            earlier = {}
        differing = [name for name in plan if earlier.get(name) != plan[name]]
        if not differing:
            print_status(f"{to}: resuming an interrupted preparation")
            return
        if not force:
            name = differing[0]
            what = "of other samples" if name == "listing" else f"with {name} {earlier.get(name)}, not {plan[name]}"
            raise InputError(
                f"{to}: holds an interrupted preparation {what}; "
                "finish that one, name another folder, or add --force to start again"
            )
    for leftover in to.glob(f"*{UNFINISHED}"):
        if leftover.stem != "lock":
            leftover.unlink()
    atomic_write(path, json.dumps(plan, indent=1))


def _keep_or_clear(to: Path) -> None:
    if all(any(to.glob(f"*.{kind}{UNFINISHED}")) for kind in ("beton", "journal")):
        print_status(f"{to}: finished parts are kept; the same command resumes from them")
        (to / f"lock{UNFINISHED}").unlink(missing_ok=True)
    else:
        _clear(to)


def _clear(to: Path) -> None:
    for leftover in to.glob(f"*{UNFINISHED}"):
        leftover.unlink()
