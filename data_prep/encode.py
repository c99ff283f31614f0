"""Samples -> encoded pictures in sample order, by a pool of processes that can die without hanging anything."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from data_prep.picture import Encoded, encode
from data_prep.samples import Sample
from data_prep.settings import PrepSettings

CHUNK = 16  # pictures a task: large enough to hide the cost of a task, small enough to keep memory low
AHEAD = 4  # tasks under way per process, which bounds memory


def encode_all(samples: Sequence[Sample], start: int, settings: PrepSettings, processes: int) -> Generator[Encoded]:
    """The samples from number `start` on, encoded, in order. One process means this one; more are started afresh.

    Raises what `encode` raises, and `RuntimeError` when a worker process dies. Close the iterator to stop early.
    """
    if processes == 1:
        yield from (encode(samples[i], settings) for i in range(start, len(samples)))
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(processes, context, initializer=_start_worker)
    try:
        yield from _in_order(pool, samples, settings, start, window=processes * AHEAD)
    except BrokenProcessPool:
        raise RuntimeError("a process that encodes pictures was killed (out of memory?); start again") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, samples: Sequence[Sample], settings: PrepSettings, start: int, window: int
) -> Iterator[Encoded]:
    under_way: deque[Future[list[Encoded]]] = deque()
    for first in range(start, len(samples), CHUNK):
        chunk = [samples[i] for i in range(first, min(first + CHUNK, len(samples)))]
        under_way.append(pool.submit(_encode_chunk, chunk, settings))
        if len(under_way) == window:
            yield from under_way.popleft().result()
    while under_way:
        yield from under_way.popleft().result()


def _encode_chunk(samples: list[Sample], settings: PrepSettings) -> list[Encoded]:
    return [encode(sample, settings) for sample in samples]


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent alone answers
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A worker whose parent was killed would wait for its next task for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
