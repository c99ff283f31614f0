"""Samples -> encoded pictures in sample order, by processes of which any may die without hanging the others.

Each has a line of its own to this process. The one queue that the standard library's pool has for all results stays
locked, with half a picture in it, when a process is killed that was writing to it: then everyone waits for ever.
"""

import multiprocessing
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import ceil
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from queue import SimpleQueue

from data_prep.picture import Encoded, encode
from data_prep.samples import Sample
from data_prep.settings import PrepSettings
from pipeline.errors import InputError

CHUNK = 16  # pictures a task: large enough to hide the cost of a task, small enough to keep memory low
WAITING = 2  # tasks a process has at a time: the one that it works at, and the next
AHEAD = 4  # tasks per process that may be done before their turn, which bounds memory

Task = tuple[int, list[Sample]]  # the number of the first, and up to CHUNK samples


def encode_all(samples: Sequence[Sample], start: int, settings: PrepSettings, processes: int) -> Generator[Encoded]:
    """The samples from number `start` on, encoded, in order. One process means this one; more are started afresh.

    Raises what `encode` raises, and `RuntimeError` when a process dies. Close the iterator to stop early.
    """
    useful = min(processes, ceil((len(samples) - start) / CHUNK))
    if useful <= 1:
        yield from (encode(samples[i], settings) for i in range(start, len(samples)))
        return
    with _workers(useful, settings) as lines:
        try:
            yield from _in_order(samples, start, lines)
        except (EOFError, OSError):  # of a line whose other end is gone
            raise RuntimeError("a process that encodes pictures was killed (out of memory?); start again") from None


@contextmanager
def _workers(count: int, settings: PrepSettings) -> Iterator[list[Connection]]:
    """The lines to this many processes that encode. Ctrl-C, which reaches every process, is answered here alone."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    resource_tracker.ensure_running()  # which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()  # so that all whom it starts have it blocked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    processes: list[ForkServerProcess] = []
    lines: list[Connection] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            lines.append(ours)
            process = context.Process(target=_work, args=(theirs, settings), daemon=True)
            process.start()
            processes.append(process)
            theirs.close()
        yield lines
    finally:
        for line in lines:
            line.close()
        for process in processes:
            process.terminate()
            process.join()


def _work(line: Connection, settings: PrepSettings) -> None:
    """Answer each task, a number and its samples, with the number and what became of them."""
    tasks: SimpleQueue[Task | None] = SimpleQueue()
    threading.Thread(target=_receive, args=(line, tasks), daemon=True).start()
    with suppress(OSError):  # the parent was killed
        while (task := tasks.get()) is not None:
            number, samples = task
            line.send((number, _encoded(samples, settings)))


def _receive(line: Connection, tasks: SimpleQueue[Task | None]) -> None:
    """Beside the work: a parent that waited for room to send a task in could not take the answer before it."""
    with suppress(EOFError, OSError):  # the parent has no more use for this process, or was killed
        while True:
            tasks.put(line.recv())
    tasks.put(None)


def _encoded(samples: list[Sample], settings: PrepSettings) -> list[Encoded] | InputError:
    try:
        return [encode(sample, settings) for sample in samples]
    except InputError as error:
        return error


def _in_order(samples: Sequence[Sample], start: int, lines: list[Connection]) -> Iterator[Encoded]:
    tasks = iter(range(start, len(samples), CHUNK))
    done: dict[int, list[Encoded] | InputError] = {}
    free = lines * WAITING
    under_way = 0
    for turn in range(start, len(samples), CHUNK):
        while turn not in done:
            while free and under_way + len(done) < len(lines) * AHEAD and (first := next(tasks, None)) is not None:
                free.pop(0).send((first, [samples[i] for i in range(first, min(first + CHUNK, len(samples)))]))
                under_way += 1
            ready = wait(lines)
            for line in (line for line in lines if line in ready):
                number, answer = line.recv()
                done[number] = answer
                free.append(line)
                under_way -= 1
        records = done.pop(turn)
        if isinstance(records, InputError):
            raise records
        yield from records
