"""The output folder while it is prepared: locked, resumable, and cleared if there is nothing to resume from.

Files whose names end in `.unfinished` are temporary: each split's data and journal, the lock, and the plan, which
records what is being prepared. manifest.json is written last.
"""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from widemix.errors import InputError
from widemix.files import atomic_write, parse_json, real_path
from widemix.formats.manifest import NAME, Manifest, manifest_json, read_manifest
from widemix.formats.text import TOKENIZER
from widemix.lock import HeldFolder, hold
from widemix.progress_line import print_status

UNFINISHED = ".unfinished"
# Followed by it; with a dot first what does not match a star, while it is written.
OURS = ("lock", "plan", ".plan", "*.beton", "*.journal", "*.crc32c", "*.sources", TOKENIZER, f".{TOKENIZER}")
FINISHED = (".beton", ".crc32c", ".sources")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
HELD = HeldFolder(
    lock=f"lock{UNFINISHED}",
    leases=f"leases{UNFINISHED}",
    busy="another process is writing to it; wait until it ends, or name another folder",
    reopens=False,  # whoever held it has just finished it
    links="*.beton*",  # of `adopt`
)


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
    with lock_folder(to):
        try:
            _resume(to, plan, force)
            yield
        except OSError as error:
            if error.errno in DISK_FULL:
                raise InputError(f"{to}: the disk is full; free some space and run the same command again") from None
            error.filename = error.filename or str(to)  # of a write, which names no file
            raise
        finally:
            with suppress(OSError):  # of a disk that has failed before, which is said
                _keep_or_clear(to)


@contextmanager
def lock_folder(to: Path) -> Iterator[None]:
    """Hold the output folder as its only writer. At the end its lock is removed, and empty folders that it has made.

    Raises `InputError` if another process is the writer, or if it cannot be written to.
    """
    missing = [folder for folder in (to, *to.parents) if not folder.exists()]
    with ExitStack() as stack:
        stack.callback(_remove_empty, missing)
        try:
            stack.enter_context(hold(to, kind=HELD))
        except OSError as error:
            raise InputError(f"{to}: cannot be written to ({error.strerror})") from None
        stack.callback(_unlink, to / HELD.lock)
        yield


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it is not empty, or not there
            folder.rmdir()


def clear_leftovers(to: Path) -> None:
    """Remove the temporary files of a process that was killed just after it wrote the manifest."""
    if leftovers(to) and os.access(to, os.W_OK):
        with lock_folder(to):
            _clear(to)


def rename_finished(to: Path, manifest: Manifest) -> None:
    """Give the finished files their names, and write the manifest last: a folder without one is not prepared.

    Files that only an earlier manifest lists are removed.
    """
    with suppress(InputError):
        for name in _files(read_manifest(to)) - _files(manifest):
            (to / name).unlink(missing_ok=True)
    (to / NAME).unlink(missing_ok=True)
    for split in manifest.splits.values():
        os.replace(to / f"{split.file}{UNFINISHED}", to / split.file)
    for name in manifest.files:
        os.replace(to / f"{name}{UNFINISHED}", to / name)
    atomic_write(to / NAME, manifest_json(manifest))


def _files(manifest: Manifest) -> set[str]:
    return {split.file for split in manifest.splits.values()} | set(manifest.files)


def check_outside(to: Path, origin: Path | None) -> None:
    """Raise `InputError` if the folder `to` is the source or lies within it, links resolved."""
    if origin is not None and real_path(to).is_relative_to(origin):
        raise InputError(f"--to {to}: lies within the source {origin}; name a folder outside of it")


def check_target(to: Path, force: bool) -> None:
    """Raise `InputError` if the folder `to`, which has no manifest, holds what no preparation has left there.

    Files such as train.beton are ours only with the plan of an unfinished preparation; without one, `force` lets them
    be replaced. Other files never are.
    """
    if not to.exists():
        return
    ours = {path.name for path in leftovers(to)} | {f".{NAME}", HELD.leases}
    others = sorted(path.name for path in to.iterdir() if path.name not in ours)
    strange = [name for name in others if not name.endswith(FINISHED) and name != TOKENIZER]
    if strange:
        raise InputError(f"{to}: holds other files ({strange[0]}, ...); name a new or an empty folder")
    if (to / f"plan{UNFINISHED}").is_file() or force:
        return
    others += sorted(name for name in ours if name.removesuffix(UNFINISHED).endswith((*FINISHED, ".journal")))
    if others:
        raise InputError(
            f"{to}: holds {others[0]} and no {NAME}, so it may be anybody's; name a new or an empty folder, or add "
            "--force to replace it"
        )


def leftovers(to: Path) -> list[Path]:
    """The temporary files that preparations leave in a folder."""
    return [path for name in OURS for path in to.glob(f"{name}{UNFINISHED}") if path.is_file()]


def _resume(to: Path, plan: dict[str, Any], force: bool) -> None:
    path = to / f"plan{UNFINISHED}"
    if path.exists() and any(to.glob(f"*.journal{UNFINISHED}")):
        try:
            earlier = {**parse_json(path.read_text(encoding="utf-8"))}  # a list raises TypeError
        except (ValueError, TypeError):
            if not force:
                raise InputError(f"{path}: is damaged; add --force to start again") from None
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
    for leftover in leftovers(to):
        if leftover.stem != "lock":
            leftover.unlink()
    atomic_write(path, json.dumps(plan, indent=1))


def _keep_or_clear(to: Path) -> None:
    if all(any(to.glob(f"*.{kind}{UNFINISHED}")) for kind in ("beton", "journal")):
        print_status(f"{to}: finished parts are kept; the same command resumes from them")
    else:
        _clear(to)


def _clear(to: Path) -> None:
    for leftover in leftovers(to):
        leftover.unlink()
