"""Ends a run that can't go on: a rank that hangs leaves stacks, a rank that dies takes the others along.

Each rank has a thread that looks at two things. Its own main thread must finish a step or an evaluated batch every
`faults.hang_timeout_s` seconds; as collectives tie the ranks together, all notice at about the same time, and each
writes the stacks of its threads to stacks/ in the run folder before any of them ends. And through the group's store
rank 0 hears of every rank and tells all of them when one has fallen silent or has failed.
"""

import faulthandler
import os
import platform
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

from torch.distributed import Store

from pipeline.distributed.rank_status import write_rank_status
from pipeline.distributed.topology import Topology
from pipeline.errors import InputError

BEAT = 2.0  # seconds between signs of life
SILENCE = 40.0  # seconds without one after which a rank is taken for dead
GRACE = 10.0  # seconds that a main thread has to end by itself, or that all ranks have to write their stacks
_FAULT, _DONE = "fault", "done"


class Watch:
    """Use it in a `with` block around all that may hang, and `beat` whenever something has been finished."""

    def __init__(self, run: Path, topology: Topology, store: Store, hang: float):
        self._topology, self._store, self._hang = topology, store, hang
        self._name = f"rank {topology.rank} on {platform.node()}"
        self._folder = run / "stacks"
        self._last = self._heard = time.monotonic()
        self._fault: str | None = None  # what another rank told
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._look, name="watch", daemon=True)]
        if topology.world > 1:
            self._threads.append(threading.Thread(target=self._talk, name="signs of life", daemon=True))

    def beat(self) -> None:
        """Something has been finished; cheap."""
        self._last = time.monotonic()

    def __enter__(self) -> "Watch":
        self._stacks = _opened(self._folder / f"rank-{self._topology.rank}.txt")
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Tell the others why this rank fails; if they told something first, that is the reason."""
        self._over.set()
        faulthandler.cancel_dump_traceback_later()
        for thread in self._threads:
            thread.join(GRACE)
        self._stacks.close()
        _remove_empty(self._folder / f"rank-{self._topology.rank}.txt")
        if error is not None and self._topology.world > 1:
            interrupted = isinstance(error, KeyboardInterrupt)
            reason = self._tell(f"{self._name}: {'interrupted' if interrupted else error}")
            alike = isinstance(error, InputError) or (reason or "").endswith(str(error))  # what all ranks find
            if reason is not None and not (interrupted or alike or reason.startswith(self._name)):
                raise RuntimeError(f"{reason}; so this rank ends ({error})") from error

    def _look(self) -> None:
        """The thread that ends the process if its main thread does not go on."""
        while not self._over.wait(min(1.0, self._hang / 10)):
            # Should this thread itself not come to run, because another keeps Python's lock: then C's own ends it.
            faulthandler.dump_traceback_later(self._hang + 2 * GRACE, exit=True, file=self._stacks)
            now = time.monotonic()
            if now - self._last > self._hang:
                where = self._folder / f"rank-{self._topology.rank}.txt"
                self._end(f"{self._name}: nothing was finished in {self._hang:g} s; the stacks are in {where}")
            elif self._topology.world > 1 and (self._fault or now - self._heard > SILENCE):
                reason = self._fault or f"the store has not answered {self._name} for {SILENCE:g} s"
                if not self._over.wait(GRACE):
                    self._end(reason)

    def _end(self, reason: str) -> None:
        self._stacks.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\n")
        self._stacks.flush()
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        if self._over.wait(GRACE / 2):  # the others write theirs; or the main thread has ended after all
            return
        if self._topology.world > 1 and self._fault is None:
            threading.Thread(target=self._tell, args=(reason,), daemon=True).start()
            time.sleep(1)
        print(f"error: {reason}", file=sys.stderr, flush=True)
        os._exit(write_rank_status(1, reason))

    def _talk(self) -> None:
        """The thread that gives signs of life and listens: any call may block where a host has gone."""
        signs = _Signs(self._topology.world)
        try:
            while not self._over.is_set():
                self._store.set(f"alive {self._topology.rank}", str(time.monotonic()))
                if self._topology.is_main:
                    silent = signs.silent(self._store)
                    if silent is not None:
                        self._tell(f"rank {silent} has given no sign of life for {SILENCE:g} s")
                if self._store.check([_FAULT]):
                    self._fault = self._store.get(_FAULT).decode()
                    return
                self._heard = time.monotonic()
                self._over.wait(BEAT)
            self._store.set(f"alive {self._topology.rank}", _DONE)
        except RuntimeError as error:  # rank 0's host, or the launcher that keeps the store, has gone
            self._fault = f"the store of the group has gone: {str(error).splitlines()[0]}"

    def _tell(self, reason: str) -> str | None:
        """Say why this rank ends, if none has said so before; what is known as the reason."""
        try:
            return self._store.compare_set(_FAULT, "", reason).decode()
        except RuntimeError:
            return self._fault


class _Signs:
    """When rank 0 last saw each rank's sign of life change."""

    def __init__(self, world: int):
        self._seen = dict.fromkeys(range(1, world), (b"", time.monotonic()))

    def silent(self, store: Store) -> int | None:
        """A rank whose sign has not changed for too long."""
        now = time.monotonic()
        for rank, (sign, since) in list(self._seen.items()):
            name = f"alive {rank}"
            latest = store.get(name) if store.check([name]) else b""
            if latest == _DONE.encode():
                del self._seen[rank]
            elif latest != sign:
                self._seen[rank] = (latest, now)
            elif now - since > SILENCE:
                return rank
        return None


def _opened(path: Path) -> TextIO:
    """A file to append to, in a folder that a rank which has failed already may remove at any time."""
    while True:
        path.parent.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):
            return path.open("a")


def _remove_empty(path: Path) -> None:
    """Stacks that were never needed, and their folder when they were the last."""
    if path.stat().st_size == 0:
        path.unlink()
    with suppress(OSError):  # others' stacks are in it, or another rank has removed it
        path.parent.rmdir()
