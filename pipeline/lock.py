"""Who writes to a folder: one process, by a lock on a file of it and by a lease.

The lock is what other processes of this machine see at once. Whether those of other machines see it depends on how
the disk is mounted (Lustre with localflock, NFS with local_lock), which nothing says: there the lease decides.
"""

import json
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from widemix.errors import InputError
from widemix.files import open_to_write, refuse_links, try_lock
from widemix.lease import EXPIRY_S, RENEWAL_S, Leases, machine_name, read_record
from widemix.terminal import print

KILLED_S = 5.0  # a killed process has its locks until its memory is freed
LOCK_WAIT_S = 150.0  # NFS frees the locks of a machine that died after 90 s, Lustre after 100 or so
_FOLDER = "run"  # the name of the lease of a whole folder


@dataclass(frozen=True)
class HeldFolder:
    """How a kind of folder is held.

    lock, leases: names of the file and the folder in it. busy: what `InputError` says of another writer, {who}.
    reopens: whether it may be written to once a writer has removed its lock. links: the pattern of links in it that
    are not ours.
    """

    lock: str = ".lock"
    leases: str = "leases"
    busy: str = "{who} is writing there; name another folder with --run-dir"
    reopens: bool = True
    links: str = "wandb/*"


@contextmanager
def hold(folder: Path, wait_s: float = LOCK_WAIT_S, kind: HeldFolder = HeldFolder()) -> Iterator[None]:
    """Hold a folder in a `with` block: by a lock on a file in it, where the file system has locks, and by a lease.

    The folder is made again if another process has removed it, as a process that could not start does. Raises
    `InputError` if the folder has links, or if another process writes to it: after `KILLED_S` if that one is on this
    machine, else after `wait_s`, since the lock of a machine that died or lost its network is freed some time later.
    """
    locked: bool | None = False

    def take() -> bool:
        nonlocal locked
        locked = try_lock(file.fileno())
        return locked is not False

    def holder() -> tuple[str, bool]:
        record = read_record(folder / kind.lock)
        who = f"process {record.get('pid')} on {record.get('host')}" if record else "another process"
        return who, record.get("machine") == _machine_and_name()

    with ExitStack() as stack:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            refuse_links(folder, kind.links)
            file = stack.enter_context(open_to_write(folder / kind.lock, "a+"))
            _wait_for(folder, take, holder, wait_s, kind)
            stack.enter_context(hold_lease(folder, EXPIRY_S / 2, wait_s, kind, math.inf if locked else None))
            if _is_at(folder / kind.lock, file.fileno()):
                break  # a lock on a file that its last holder has removed holds nothing
            if not kind.reopens:
                raise InputError(f"{folder}: {kind.busy.format(who='another process')}")
            stack.close()
        file.truncate(0)
        json.dump({"host": platform.node(), "pid": os.getpid(), "machine": _machine_and_name()}, file)
        file.flush()
        yield


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether a path is that of an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def hold_lease(
    folder: Path,
    expiry_s: float = EXPIRY_S / 2,
    wait_s: float = math.inf,
    kind: HeldFolder = HeldFolder(),
    patience_s: float | None = None,
) -> Iterator[None]:
    """Hold a folder in a `with` block by a lease, which a thread renews; `InputError` if another process holds it.

    Waits at most `wait_s` until the lease of a process that died on another machine has expired. If this process was
    suspended for longer than that and another one has taken the folder since, this one exits; also if the file system
    does not answer for `patience_s` (default: `expiry_s`), in which another one may have taken it.
    """
    leases = Leases(folder, expiry_s, kind.leases, patience_s)

    def holder() -> tuple[str, bool]:
        found = leases.holder(_FOLDER)
        who = f"process {found.pid} on {found.host}" if found else "another process"
        return who, found is not None and found.machine == machine_name()

    _wait_for(folder, lambda: leases.take(_FOLDER), holder, min(wait_s, 1.5 * expiry_s), kind)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(expiry_s * RENEWAL_S / EXPIRY_S):
            if folder.is_dir() and not leases.renew(_FOLDER):  # the next file in one that was moved says so
                why = "another run has taken it, since this one was suspended or its lease could not be renewed"
                print(f"error: {folder}: {why}", file=sys.stderr)
                sys.stderr.flush()
                os._exit(1)  # a checkpoint of ours would be mixed with those of the other

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        leases.release(_FOLDER)


def _wait_for(
    folder: Path, take: Callable[[], bool], holder: Callable[[], tuple[str, bool]], wait_s: float, kind: HeldFolder
) -> None:
    """Wait until `take` succeeds; `InputError` after `wait_s`, at most `KILLED_S` where the holder is near.

    holder: who holds the folder, and whether on this machine.
    """
    began, announced = time.monotonic(), False
    while not take():
        who, is_near = holder()
        if time.monotonic() - began > (min(KILLED_S, wait_s) if is_near else wait_s):
            raise InputError(f"{folder}: {kind.busy.format(who=who)}")
        if not (is_near or announced):
            print(f"{folder}: held by {who}; waiting until it is free", file=sys.stderr, flush=True)
            announced = True
        time.sleep(min(0.25 if is_near else 1.0, wait_s / 15))


def _machine_and_name() -> str:
    """Return the names of machine and host: another host may have another network, and live on when that is cut."""
    return f"{machine_name()} {platform.node()}"
