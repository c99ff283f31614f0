"""Ends a run that cannot continue: when a rank hangs, after writing all stacks; when a rank dies, on all ranks.

Each rank has a thread that checks two things. The rank's main thread must finish a step or an evaluated batch every
`faults.hang_timeout_s` seconds; as collectives tie the ranks together, all notice a hang at about the same time, and
each writes the stacks of its threads to stacks/ in the run folder before any of them exits. And each rank sends
heartbeats through the process group's store: rank 0 reports a rank whose heartbeats stop, and every rank reads what
another has reported as failed.

Only time in which this process runs counts: batch systems and Ctrl-Z suspend one for hours, after which it goes on.
"""

import faulthandler
import math
import os
import platform
import signal
import sys
import threading
import time
from contextlib import suppress
from ctypes import CDLL
from pathlib import Path
from types import TracebackType
from typing import TextIO

from torch.distributed import Store

from widemix.distributed.rank_status import write_rank_status
from widemix.distributed.topology import Topology
from widemix.errors import InputError, RunError
from widemix.native.build import BuildError
from widemix.native.library import open_library
from widemix.terminal import print

HEARTBEAT_INTERVAL = 2.0  # seconds
HEARTBEAT_TIMEOUT = 40.0  # seconds without a heartbeat after which a rank counts as dead
GRACE_PERIOD = 10.0  # seconds for a main thread to end by itself, or for all ranks to write their stacks
WRITER_TIMEOUTS = 10  # of a step, in which each file of a checkpoint must be written
LONGEST_GAP = 5.0  # seconds between two looks at the clock, at most: of a longer time this process was suspended
_FAILURE, _DONE = "failure", "done"


class Watchdog:
    """Use it in a `with` block around everything that may hang, and call `beat` after each step or batch.

    An error that leaves the block is reported to the other ranks. If another rank had reported a failure before, a
    `RuntimeError` that starts with that one's reason takes its place.

    interval_s, silence_s: seconds between heartbeats, and without one after which a rank counts as dead. grace_s: for
    a main thread to end by itself, or for all ranks to write their stacks.
    """

    def __init__(
        self,
        run_dir: Path,
        topology: Topology,
        store: Store,
        timeout_s: float,
        interval_s: float = HEARTBEAT_INTERVAL,
        silence_s: float = HEARTBEAT_TIMEOUT,
        grace_s: float = GRACE_PERIOD,
    ):
        self._topology, self._store, self._timeout_s = topology, store, timeout_s
        self._interval_s, self._silence_s, self._grace_s = interval_s, silence_s, grace_s
        self._name = f"rank {topology.rank} on {platform.node()}"
        self._stacks_path = run_dir / "stacks" / f"rank-{topology.rank}.txt"
        self._clock = _RunningTime(min(LONGEST_GAP, timeout_s / 2))
        self._last_beat = self._last_contact = self._clock.now()
        self._written, self._wrote = -1, 0.0  # see `note_written`, and when it last changed
        self._failure: str | None = None  # as another rank reported it
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._check_progress, name="watchdog", daemon=True)]
        if topology.world > 1:
            self._threads.append(threading.Thread(target=self._exchange_heartbeats, name="heartbeats", daemon=True))

    def beat(self) -> None:
        """Note that a step or a batch has been finished; cheap."""
        self._last_beat = self._clock.now()

    def note_written(self, count: int) -> None:
        """Note that the main thread waits for a checkpoint, and how many files of it are written, which is progress.

        A file may take WRITER_TIMEOUTS times as long as a step.
        """
        now = self._clock.now()
        if count != self._written:
            self._written, self._wrote = count, now
        if now - self._wrote < WRITER_TIMEOUTS * self._timeout_s:
            self.beat()

    def __enter__(self) -> "Watchdog":
        self._stacks = _open_to_append(self._stacks_path)
        self._countdown = _Countdown(self._stacks, f"error: {self._name}: no thread of Python ran; {self._where()}")
        self._begin_countdown()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(self._grace_s)
        self._countdown.close()
        self._stacks.close()
        _remove_if_empty(self._stacks_path)
        if error is not None and self._topology.world > 1:
            interrupted = isinstance(error, KeyboardInterrupt)
            reason = self._report_failure(f"{self._name}: {'interrupted' if interrupted else error}")
            first = reason is not None and reason.startswith(self._name)
            if first and self._topology.is_main and not (interrupted or isinstance(error, InputError)):
                time.sleep(1.5 * self._interval_s)  # the store may end with this process: the others read it before
            same = isinstance(error, InputError) or (reason or "").endswith(str(error))  # every rank raises it
            if reason is not None and not (interrupted or same or first):
                raise RunError(f"{reason}; so this rank ends ({error})") from error

    def _check_progress(self) -> None:
        """In a thread: end the process if its main thread makes no progress, or if another rank has failed."""
        while not self._stopped.wait(min(1.0, self._timeout_s / 10)):
            self._begin_countdown()
            now = self._clock.now()
            if now - self._last_beat > self._timeout_s:
                self._exit_with_stacks(
                    f"{self._name}: no step or batch was finished in {self._timeout_s:g} s; {self._where()}"
                )
            elif self._topology.world > 1 and (self._failure or now - self._last_contact > self._silence_s):
                reason = self._failure or f"{self._name} had no answer from the store for {self._silence_s:g} s"
                if not self._stopped.wait(self._grace_s):
                    self._exit_with_stacks(reason)

    def _begin_countdown(self) -> None:
        self._countdown.begin(self._timeout_s + 2 * self._grace_s)

    def _where(self) -> str:
        return f"the stacks are in {self._stacks_path}"

    def _exit_with_stacks(self, reason: str) -> None:
        self._stacks.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\n")
        self._stacks.flush()
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        if self._stopped.wait(self._grace_s / 2):  # while others write theirs, the main thread has ended after all
            return
        if self._topology.world > 1 and self._failure is None:
            threading.Thread(target=self._report_failure, args=(reason,), daemon=True).start()
            time.sleep(1)
        print(f"error: {reason}", file=sys.stderr, flush=True)
        os._exit(write_rank_status(1, reason))

    def _exchange_heartbeats(self) -> None:
        """In a thread, as any call may block when a host has gone: send heartbeats, and read reported failures."""
        others = _Heartbeats(self._topology.world, self._clock.now(), self._silence_s)
        try:
            while not self._stopped.is_set():
                self._store.set(f"alive {self._topology.rank}", str(time.monotonic()))
                if self._topology.is_main:
                    silent = others.find_silent(self._store, self._clock.now())
                    if silent is not None:
                        self._report_failure(f"rank {silent} has sent no heartbeat for {self._silence_s:g} s")
                if self._store.check([_FAILURE]):
                    self._failure = self._store.get(_FAILURE).decode()
                    return
                self._last_contact = self._clock.now()
                self._stopped.wait(self._interval_s)
            self._store.set(f"alive {self._topology.rank}", _DONE)
        except RuntimeError as error:  # rank 0's host, or the launcher that keeps the store, has gone
            self._failure = f"the process group's store is unreachable: {str(error).splitlines()[0]}"

    def _report_failure(self, reason: str) -> str | None:
        """Report why this rank ends, unless a failure was reported before; return the first reported reason."""
        try:
            return self._store.compare_set(_FAILURE, "", reason).decode()
        except RuntimeError:
            return self._failure


class _RunningTime:
    """A clock that stands still while this process is suspended.

    longest_gap: in seconds, what it goes on at most between two looks at it.
    """

    def __init__(self, longest_gap: float) -> None:
        self._longest_gap, self._lock = longest_gap, threading.Lock()
        self._seconds, self._looked = 0.0, time.monotonic()

    def now(self) -> float:
        """Running seconds since it was made. Any thread may ask."""
        with self._lock:
            before, self._looked = self._looked, time.monotonic()
            self._seconds += min(self._looked - before, self._longest_gap)
            return self._seconds


class _Countdown:
    """Ends this process with its stacks if a thread waits for ever with the GIL, so that no other of Python's runs.

    Counts in a thread of C, which needs no GIL. Without compiled code such a hang is not ended.
    """

    SIGNAL = getattr(signal, "SIGRTMAX", 0)  # nobody else's

    def __init__(self, stacks: TextIO, words: str):
        self._library: CDLL | None = None
        with suppress(BuildError):
            self._library = open_library()
            faulthandler.register(self.SIGNAL, stacks)
            self._library.start_countdown(self.SIGNAL, words.encode())

    def begin(self, seconds: float) -> None:
        """Count from here, not from before."""
        if self._library:
            self._library.set_countdown(math.ceil(seconds))

    def close(self) -> None:
        """Stop counting, before the file of the stacks is closed."""
        if self._library:
            self._library.set_countdown(0)
            faulthandler.unregister(self.SIGNAL)


class _Heartbeats:
    """When rank 0 last saw each rank's heartbeat change."""

    def __init__(self, world: int, now: float, silence_s: float):
        self._silence_s = silence_s
        self._seen = dict.fromkeys(range(1, world), (b"", now))

    def find_silent(self, store: Store, now: float) -> int | None:
        """Return a rank whose heartbeat has not changed for `silence_s`; None if there is none."""
        for rank, (value, since) in list(self._seen.items()):
            name = f"alive {rank}"
            latest = store.get(name) if store.check([name]) else b""
            if latest == _DONE.encode():
                del self._seen[rank]
            elif latest != value:
                self._seen[rank] = (latest, now)
            elif now - since > self._silence_s:
                return rank
        return None


def _open_to_append(path: Path) -> TextIO:
    """Open a file whose folder a rank that has already failed may remove at any time."""
    while True:
        path.parent.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):
            return path.open("a")


def _remove_if_empty(path: Path) -> None:
    """Remove a stacks file that was never written to, and its folder if it was the last."""
    with suppress(OSError):  # other ranks' stacks are in it, another rank has removed it, or the run folder was moved
        if path.stat().st_size == 0:
            path.unlink()
        path.parent.rmdir()
