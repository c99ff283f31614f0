"""Who writes to a run folder: one process, by a lock, or by a lease where the file system has no locks."""

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from widemix.errors import InputError
from widemix.files import try_lock
from widemix.run.lease import EXPIRY_S, RENEWAL_S, Leases, machine_name, read_record
from widemix.terminal import print

KILLED_S = 5.0  # a killed process has its locks until its memory is freed
LOCK_WAIT_S = 150.0  # NFS frees the locks of a machine that died after 90 s, Lustre after 100 or so
_FOLDER = "run"  # the name of the lease of a whole run folder


@contextmanager
def hold(folder: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Hold a run folder, by a lock on its file .lock, or by a lease where the file system has no locks.

    Makes it where another process has removed it, as one does that could not start. Raises `InputError` if another
    process writes there: after `wait_s`, since the lock of a machine that died, or was cut off and has still to
    notice it, is free some time later; at most after `KILLED_S` if it is on this machine.
    """
    locked: bool | None = False

    def take() -> bool:
        nonlocal locked
        locked = try_lock(file.fileno())
        return locked is not False

    def holder() -> tuple[str, bool]:
        record = read_record(folder / ".lock")
        who = f"process {record.get('pid')} on {record.get('host')}" if record else "another process"
        return who, record.get("machine") == _machine_and_name()

    with ExitStack() as stack:
        is_there = False
        while not is_there:  # a lock on a file that its last holder has removed holds nothing
            stack.close()
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / ".lock").open("a+"))
            _wait_for(folder, take, holder, wait_s)
            is_there = not locked or _is_at(folder / ".lock", file.fileno())
        if locked:
            file.truncate(0)
            json.dump({"host": platform.node(), "pid": os.getpid(), "machine": _machine_and_name()}, file)
            file.flush()
        with nullcontext() if locked else hold_lease(folder):
            yield


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether a path is that of an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def hold_lease(folder: Path, expiry_s: float = EXPIRY_S / 2) -> Iterator[None]:
    """Hold a run folder, renewing its lease from a thread; raises `InputError` if another process keeps renewing it.

    Waits until the lease of a process that died elsewhere has expired. If another process takes the folder since this
    one was suspended for longer than that, this one ends at once.
    """
    leases = Leases(folder, expiry_s)

    def holder() -> tuple[str, bool]:
        found = leases.holder(_FOLDER)
        return (f"process {found.pid} on {found.host}" if found else "another process"), False

    _wait_for(folder, lambda: leases.take(_FOLDER), holder, 1.5 * expiry_s)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(expiry_s * RENEWAL_S / EXPIRY_S):
            if not leases.renew(_FOLDER):
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


def _wait_for(folder: Path, take: Callable[[], bool], holder: Callable[[], tuple[str, bool]], wait_s: float) -> None:
    """Wait until `take` succeeds; `InputError` after `wait_s`, at most `KILLED_S` where the holder is near.

    holder: who holds the folder, and whether on this machine.
    """
    began, announced = time.monotonic(), False
    while not take():
        who, is_near = holder()
        if time.monotonic() - began > (min(KILLED_S, wait_s) if is_near else wait_s):
            raise InputError(f"{folder}: {who} is writing there; name another folder with --run-dir")
        if not (is_near or announced):
            print(f"{folder}: held by {who}; waiting until it is free", file=sys.stderr, flush=True)
            announced = True
        time.sleep(min(0.25 if is_near else 1.0, wait_s / 15))


def _machine_and_name() -> str:
    """The same, and its name: what has another name may have another network, and live on when that is cut."""
    return f"{machine_name()} {platform.node()}"
