"""Requests to the training loop, to stop, to save or to evaluate, and the signals that ask for a stop.

Ctrl-C, SIGTERM, SIGHUP, SIGQUIT and SIGUSR1 ask the run to stop after the current step, with a checkpoint. All ranks
read what is asked for at the same step.
"""

import enum
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import Store

from widemix.distributed.topology import Topology
from widemix.processes import KEYS, leave_closed_terminal, stop_signals

_CHECK_INTERVAL = 0.1  # seconds between rank 0's looks into the store
_STOP = "stop requested"


class Request(enum.IntFlag):
    """Requests to the ranks, which may come at any time."""

    NONE = 0
    STOP = enum.auto()
    SAVE = enum.auto()
    EVALUATE = enum.auto()


class SharedRequests:
    """Rank 0's requests, and a STOP of any rank, as all ranks read them at the same step.

    Each step rank 0 starts an asynchronous broadcast over gloo, and all read that of the step before, so that
    training never waits for it. A broadcast is a tree: at 128 ranks 7 messages follow on each other, where an
    all-reduce of one number is a ring of 254. Other ranks leave a STOP for rank 0 in the process group's store.
    """

    def __init__(self, topology: Topology, store: Store):
        self._is_main, self._world, self._store = topology.is_main, topology.world, store
        self._stop = False  # of another rank, on rank 0; of this one on the others
        self._next_check = 0.0
        self._message = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._work: dist.Work | None = None

    def poll(self, requests: Request) -> Request:
        """Share this rank's requests; return what rank 0 had at the previous call. Call it once a step.

        Of ranks other than 0 only STOP is shared, and a few steps later.
        """
        previous = self.finish()
        if not self._is_main:
            self._leave_stop(requests)
        elif self._world > 1 and self._stop_left():
            requests |= Request.STOP
        self._message = torch.tensor([requests], dtype=torch.uint8, device="cpu")
        if self._world > 1:
            self._work = dist.broadcast(self._message, src=0, async_op=True)
        return previous

    def finish(self) -> Request:
        """Wait for the broadcast in flight, if any, and return its requests."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        found = Request(int(self._message))
        self._message.zero_()
        return found

    def _leave_stop(self, requests: Request) -> None:
        if Request.STOP in requests and not self._stop:
            self._stop = True
            with suppress(RuntimeError):  # the store is unreachable: the watchdog ends the run
                self._store.set(_STOP, "")

    def _stop_left(self) -> bool:
        if not self._stop and time.monotonic() >= self._next_check:
            with suppress(RuntimeError):
                self._stop = self._store.check([_STOP])
            self._next_check = time.monotonic() + _CHECK_INTERVAL
        return self._stop


class Stopped(Exception):
    """A signal came while there was nothing to save; its text is the signal's name."""


class StopRequest:
    """A flag that a signal sets and the training loop reads; use it in a `with` block.

    A second Ctrl-C, or Ctrl-\\, raises KeyboardInterrupt at once, as Python does without a handler. One after another
    signal is the first: the SIGTERM that whoever started this rank passes on may overtake it.
    """

    came = False  # whether any in this process has been set

    def __init__(self) -> None:
        self.requested = False
        self._key = False  # a key of the terminal was among the signals
        self._at_once = False

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._request) for number in stop_signals()}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise `Stopped` for a signal while in this block, which waits for what may never come."""
        self._at_once = True
        try:
            if self.requested:
                raise Stopped("a signal")
            yield
        finally:
            self._at_once = False

    def _request(self, number: int, frame: FrameType | None) -> None:
        leave_closed_terminal()
        key, again = number in KEYS, self._key and number in KEYS
        known, self.requested, self._key = self.requested, True, self._key or key
        StopRequest.came = True
        if self._at_once:
            self._at_once = False
            raise Stopped(_name(number))
        if again:
            raise KeyboardInterrupt
        if (key or not known) and os.environ.get("RANK", "0") == "0":
            more = f"; a second {KEYS[number]} stops at once" if key else ""
            with suppress(OSError):  # Ctrl-C also ended what read it, such as tee
                # not print: the signal may have interrupted another one
                os.write(2, f"{_name(number)}: stopping after this step, with a checkpoint{more}\n".encode())


@contextmanager
def stops_once() -> Iterator[None]:
    """Let a process that only trains in this block end with its own exit code once it was asked to stop.

    A stop often comes twice: from a terminal, `pkill` or a batch system, and from whoever started the rank. After the
    `StopRequest` that took the first one, all but keys are ignored.
    """
    others = [number for number in stop_signals() if number not in KEYS]

    def late(number: int, _: FrameType | None) -> None:
        if not StopRequest.came:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in others:
        signal.signal(number, late)
    try:
        yield
    finally:
        if StopRequest.came:
            for number in others:
                signal.signal(number, signal.SIG_IGN)  # which holds until the process has ended, as `late` does not


def _name(number: int) -> str:
    return KEYS.get(number) or signal.Signals(number).name
