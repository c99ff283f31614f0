"""Processes that end with those that started them, and the signals that ask a process to save and end."""

import ctypes
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

KEYS: dict[int, str] = {signal.SIGINT: "Ctrl-C"}  # of a terminal, which signals all
if sys.platform != "win32":
    KEYS[signal.SIGQUIT] = "Ctrl-\\"
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a process to save what it has and end, the same for all that handle any of them.

    SIGHUP, of a closed terminal, and SIGQUIT, of Ctrl-\\, are not among them where they were ignored when the process
    started, as nohup does with the first.
    """
    if sys.platform == "win32":
        return signal.SIGINT, signal.SIGTERM
    unless_ignored = (signal.SIGHUP, signal.SIGQUIT)
    others = (number for number in unless_ignored if signal.getsignal(number) != signal.SIG_IGN)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *others)


@contextmanager
def unwinding() -> Iterator[None]:
    """Let a signal other than Ctrl-C's unwind this block, which removes what it has not finished, and then end the
    process."""
    came: list[int] = []

    def unwind(number: int, _: FrameType | None) -> None:
        came.append(number)
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, unwind) for number in stop_signals() if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def leave_closed_terminal() -> None:
    """Let what was printed on a terminal that has been closed go nowhere: writing to it raises errors."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                os.dup2(nothing, descriptor)
    os.close(nothing)


def end_with_parent(number: int = signal.SIGTERM) -> Callable[[], None]:
    """Return a `preexec_fn` of subprocess: the kernel sends the new process this signal when this one has died.

    More exactly when the thread that started it has ended. A process whose parent died before it asked ends at once.
    Only Linux's kernel does so.
    """
    parent, libc = os.getpid(), ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(128 + number)

    return prepare


def end_with_torchrun() -> None:
    """In a rank that torchrun has started: SIGTERM when torchrun, which cannot say so any more, has died."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def keep_current_folder_off_path() -> None:
    """Let no Python that this process starts, directly or not, import from the current folder: a stranger's, perhaps.

    Otherwise `python -m` and `python -c` do, also in ranks of torchrun. So does an empty item of PYTHONPATH, which
    `export PYTHONPATH=/x:$PYTHONPATH` makes.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    if path := os.environ.get("PYTHONPATH"):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path.split(os.pathsep)))


def children_cpu_seconds() -> float:
    """Return the CPU time of the child processes that have ended and were waited for, and of theirs."""
    times = os.times()
    return times.children_user + times.children_system


def peak_resident_bytes() -> int:
    """Return the most memory that this process has held so far."""
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
