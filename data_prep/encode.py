"""Samples -> encoded pictures in sample order, by processes of which any may die without hanging the others.

Each has a line of its own to this process. The one queue that the standard library's pool has for all results stays
locked, with half a picture in it, when a process is killed that was writing to it: then everyone waits for ever.
"""

import multiprocessing
import signal
import statistics
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue

from data_prep.picture import Encoded, encode
from data_prep.samples import Sample
from data_prep.settings import PrepSettings
from pipeline.errors import InputError

CHUNK = 16  # pictures a task: large enough to hide the cost of a task, small enough to keep memory low
WAITING = 2  # tasks a process has at a time: the one that it works at, and the next
AHEAD = 4  # tasks per process that may be done before their turn, which bounds memory
TRIED = 32  # pictures that are encoded first, to see how long it takes
WORTH = 1.0  # seconds of work for which a process is worth its start, which takes half a second

Task = tuple[int, list[Sample]]  # the number of the first, and up to CHUNK samples
Answer = tuple[list[Encoded], InputError | None]  # what became of them; with an error, of those before it


def encode_all(samples: Sequence[Sample], start: int, settings: PrepSettings, processes: int) -> Generator[Encoded]:
    """The samples from number `start` on, encoded, in order. Of at most so many processes this one is the first.

    Raises what `encode` raises, and `RuntimeError` when a process dies. Close the iterator to stop early.
    """
    took: list[float] = []  # seconds: the first pictures tell how many processes are worth their start
    while processes > 1 and len(took) < TRIED and start < len(samples):
        began = time.perf_counter()
        record = encode(samples[start], settings)
        took.append(time.perf_counter() - began)
        start += 1
        yield record
    alone = (len(samples) - start) * statistics.median(took) if took else 0.0
    others = min(processes - 1, int(alone / WORTH))
    if not others:
        yield from (encode(samples[i], settings) for i in range(start, len(samples)))
        return
    with _workers(others, settings) as lines:
        try:
            yield from _in_order(samples, start, settings, lines)
        except (EOFError, OSError):  # of a line whose other end is gone
            raise RuntimeError("a process that encodes pictures was killed (out of memory?); start again") from None


@contextmanager
def _workers(count: int, settings: PrepSettings) -> Iterator[list[Connection]]:
    """The lines to this many processes that encode. Ctrl-C, which reaches every process, is answered here alone."""
    context = multiprocessing.get_context("spawn")  # nobody waits for them: the work begins here
    processes: list[SpawnProcess] = []
    lines: list[Connection] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            lines.append(ours)
            process = context.Process(target=_work, args=(theirs, settings), daemon=True)
            _start_deaf(process)
            processes.append(process)
            theirs.close()
        yield lines
    finally:
        for line in lines:
            line.close()
        for process in processes:
            process.terminate()
            process.join()


def _start_deaf(process: SpawnProcess) -> None:
    """With SIGINT blocked, as it is here while it starts."""
    resource_tracker.ensure_running()  # which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(line: Connection, settings: PrepSettings) -> None:
    """Answer each task, a number and its samples, with the number and what became of them."""
    tasks: SimpleQueue[Task | None] = SimpleQueue()
    threading.Thread(target=_receive, args=(line, tasks), daemon=True).start()
    with suppress(OSError):  # the parent was killed
        while (task := tasks.get()) is not None:
            number, samples = task
            done: dict[int, Answer] = {}
            for _ in _piecemeal(number, samples, settings, done):
                pass
            records, error = done[number]
            line.send((number, ([record.light() for record in records], error)))


def _receive(line: Connection, tasks: SimpleQueue[Task | None]) -> None:
    """Beside the work: a parent that waited for room to send a task in could not take the answer before it."""
    with suppress(EOFError, OSError):  # the parent has no more use for this process, or was killed
        while True:
            tasks.put(line.recv())
    tasks.put(None)


def _in_order(
    samples: Sequence[Sample], start: int, settings: PrepSettings, lines: list[Connection]
) -> Iterator[Encoded]:
    """What the processes at the lines make, and this one where it would only wait for them."""
    done: dict[int, Answer] = {}
    upcoming = start  # the first sample that nobody has been given
    mine: Iterator[None] | None = None
    free = lines * WAITING
    for turn in range(start, len(samples), CHUNK):
        end = min(len(samples), turn + (len(lines) + 1) * AHEAD * CHUNK)
        while turn not in done:
            while free and upcoming < end:
                free.pop(0).send((upcoming, _task(samples, upcoming)))
                upcoming += CHUNK
            if mine is None and upcoming < end and not wait(lines, 0):
                mine = _piecemeal(upcoming, _task(samples, upcoming), settings, done)
                upcoming += CHUNK
            ready = wait(lines, None if mine is None else 0)
            for line in (line for line in lines if line in ready):
                number, answer = line.recv()
                done[number] = answer
                free.append(line)
            if mine is not None and next(mine, mine) is mine:
                mine = None
        records, error = done.pop(turn)
        yield from records
        if error:
            raise error


def _task(samples: Sequence[Sample], first: int) -> list[Sample]:
    return [samples[i] for i in range(first, min(first + CHUNK, len(samples)))]


def _piecemeal(number: int, samples: list[Sample], settings: PrepSettings, done: dict[int, Answer]) -> Iterator[None]:
    """Put what becomes of a task in `done`, with a pause after each picture, in which others can be given theirs."""
    records: list[Encoded] = []
    try:
        for sample in samples:
            records.append(encode(sample, settings))
            yield
        done[number] = records, None
    except InputError as error:
        done[number] = records, error
