"""Requests to the training loop that all ranks read at the same step: to stop, to save, to evaluate."""

import enum
import time
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed import Store

from widemix.distributed.topology import Topology

_CHECK_INTERVAL = 0.1  # seconds between rank 0's looks into the store
_STOP = "stop requested"


class Request(enum.IntFlag):
    """What the ranks may be asked for, at any time."""

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
        self._work = dist.broadcast(self._message, src=0, async_op=True)
        return previous

    def finish(self) -> Request:
        """Wait for the broadcast in flight, if any, and return its requests."""
        if self._work is None:
            return Request.NONE
        self._work.wait()
        self._work = None
        return Request(int(self._message))

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
