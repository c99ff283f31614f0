"""The folder while it is prepared: locked, resumable, and clean again when nothing worth keeping was done.

Names that end in `.unfinished` are ours: the data and journals of each split, the plan that says what they are of,
and the lock. manifest.json comes last of all.
"""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.progress import say
from pipeline.errors import InputError
from pipeline.files import atomic_write, try_lock
from pipeline.formats.manifest import NAME, Manifest, manifest_json

UNFINISHED = ".unfinished"
FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def permitted() -> Iterator[None]:
    """`InputError` in place of the system's complaint about a folder or file that may not be entered or read."""
    try:
        yield
    except PermissionError as error:
        raise InputError(f"{error.filename}: may not be entered, read or written by this user") from None


@contextmanager
def workplace(to: Path, plan: dict[str, Any], force: bool) -> Iterator[None]:
    """Hold the folder for the preparation that `plan` describes, going on with what an earlier one of it has done.

    Raises `InputError` when the folder cannot be written to, is full or held by another process, or has an unfinished
    preparation of another plan (unless `force`). Whatever goes wrong inside, finished shards stay; without any, all
    that was created goes.
    """
    missing = [folder for folder in (to, *to.parents) if not folder.exists()]
    try:
        try:
            to.mkdir(parents=True, exist_ok=True)
            lock = (to / f"lock{UNFINISHED}").open("a")
        except OSError as error:
            raise InputError(f"{to}: cannot be written to ({error.strerror})") from None
        with lock:
            _hold(to, lock.fileno())
            try:
                _take_up(to, plan, force)
                yield
            except OSError as error:
                if error.errno not in FULL:
                    raise
                raise InputError(f"{to}: the disk is full; make room and give the same command again") from None
            finally:
                _leave(to)
    finally:
        for folder in missing:
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()


def tidy(to: Path) -> None:
    """Take away what a process left that was killed after it had written the manifest."""
    if any(to.glob(f"*{UNFINISHED}")) and os.access(to, os.W_OK):
        with (to / f"lock{UNFINISHED}").open("a") as lock:
            _hold(to, lock.fileno())
            _clear(to)


def publish(to: Path, manifest: Manifest) -> None:
    """Give the files their names, the manifest last: a folder without one is not prepared."""
    (to / NAME).unlink(missing_ok=True)
    for split in manifest.splits.values():
        os.replace(to / f"{split.file}{UNFINISHED}", to / split.file)
    for name in manifest.files:
        os.replace(to / f"{name}{UNFINISHED}", to / name)
    atomic_write(to / NAME, manifest_json(manifest))


def data_path(to: Path, split: str) -> Path:
    return to / f"{split}.beton{UNFINISHED}"


def journal_path(to: Path, split: str) -> Path:
    return to / f"{split}.journal{UNFINISHED}"


def _hold(to: Path, lock: int) -> None:
    busy = InputError(f"{to}: another process is preparing it; wait for that one, or name another folder")
    if not try_lock(lock):
        raise busy
    name = to / f"lock{UNFINISHED}"
    if not name.exists() or name.stat().st_ino != os.fstat(lock).st_ino:  # its holder has just finished
        raise busy


def _take_up(to: Path, plan: dict[str, Any], force: bool) -> None:
    path = to / f"plan{UNFINISHED}"
    if path.exists() and any(to.glob(f"*.journal{UNFINISHED}")):
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            earlier = {}
        differing = [name for name in plan if earlier.get(name) != plan[name]]
        if not differing:
            say(f"{to}: going on with an unfinished preparation")
            return
        if not force:
            name = differing[0]
            what = "of other pictures" if name == "listing" else f"with {name} {earlier.get(name)}, not {plan[name]}"
            raise InputError(
                f"{to}: holds an unfinished preparation {what}; "
                "finish that one, name another folder, or give --force to start anew"
            )
    for leftover in to.glob(f"*{UNFINISHED}"):
        if leftover.stem != "lock":
            leftover.unlink()
    atomic_write(path, json.dumps(plan, indent=1))


def _leave(to: Path) -> None:
    if all(any(to.glob(f"*.{kind}{UNFINISHED}")) for kind in ("beton", "journal")):
        say(f"{to}: what is done stays there; the same command goes on with the rest")
        (to / f"lock{UNFINISHED}").unlink(missing_ok=True)
        return
    _clear(to)


def _clear(to: Path) -> None:
    for leftover in to.glob(f"*{UNFINISHED}"):
        leftover.unlink()
