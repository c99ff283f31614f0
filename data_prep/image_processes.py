"""Samples -> encoded images in sample order, by several processes. If one of them dies, the others do not hang.

Each process has its own pipe to this one. The standard library's process pool shares one result queue instead: when
a process is killed while it writes to that queue, the queue stays locked with half a result in it, and everyone waits
forever.

The processes do not come from `multiprocessing` either, which runs the user's script again in each of them, unless
that is written for it (`if __name__ == "__main__"`), and cannot start from a notebook's or a piped script.
"""

import multiprocessing
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue

from widemix.data_prep.image import encode
from widemix.data_prep.records import Encoded
from widemix.data_prep.samples import Sample
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError, RunError

CHUNK = 16  # images per task: enough to hide the overhead of a task, few enough to keep memory low
TASKS_PER_PROCESS = 2  # that a process holds at a time: the current one and the next
MAX_AHEAD = 4  # finished tasks per process that may wait for their turn, which bounds memory
TIMED = 32  # images that are encoded first, to measure how long one takes
MIN_SECONDS_PER_PROCESS = 1.0  # work that justifies another process, whose start takes half a second

Task = tuple[int, list[Sample]]  # the number of the first sample, and up to CHUNK samples
# What a process runs; its arguments are the descriptor of its pipe and this process's sys.path.
_MAIN = f"import sys; file, *sys.path = sys.argv[1:]; from {__name__} import work; work(int(file))"

Result = tuple[list[Encoded], InputError | None]  # of a task; after an error, the samples before it


def encode_all(samples: Sequence[Sample], start: int, settings: PrepSettings, processes: int) -> Generator[Encoded]:
    """Encode the samples from number `start` on, in order, with at most `processes` processes including this one.

    Raises what `encode` raises, and `RunError` if a process dies. Close the iterator to stop early.
    """
    durations: list[float] = []  # seconds per image, to decide how many processes are worth starting
    while processes > 1 and len(durations) < TIMED and start < len(samples):
        began = time.perf_counter()
        record = encode(samples[start], settings)
        durations.append(time.perf_counter() - began)
        start += 1
        yield record
    seconds = (len(samples) - start) * statistics.median(durations) if durations else 0.0
    others = min(processes - 1, int(seconds / MIN_SECONDS_PER_PROCESS))
    if not others:
        yield from (encode(samples[i], settings) for i in range(start, len(samples)))
        return
    with workers(others, settings) as pipes:
        yield from in_order(samples, start, settings, pipes)


@contextmanager
def workers(count: int, settings: PrepSettings) -> Iterator[list[Connection]]:
    """Start processes that encode; yields the pipes to them. Only this process handles Ctrl-C, which reaches all."""
    processes: list[subprocess.Popen] = []
    pipes: list[Connection] = []
    try:
        for _ in range(count):  # this process encodes while they start
            ours, theirs = multiprocessing.Pipe()
            pipes.append(ours)
            processes.append(_start_without_sigint(theirs.fileno()))
            theirs.close()
            ours.send(settings)
        try:
            yield pipes
        except (EOFError, OSError):  # the other end of a pipe is closed
            raise RunError(f"a process that encodes images {_cause_of_death(processes)}; start again") from None
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.terminate()
            process.wait()


def _cause_of_death(processes: list[subprocess.Popen]) -> str:
    """How the first of them has ended, whose pipe is closed already."""
    deadline = time.monotonic() + 10
    while all(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.01)
    code = next((code for process in processes if (code := process.returncode) is not None), -signal.SIGKILL)
    return "was killed (out of memory?)" if code < 0 else f"ended with exit code {code}, by the error above"


def _start_without_sigint(file: int) -> subprocess.Popen:
    """Start a process with one end of a pipe; it inherits a signal mask in which SIGINT is blocked."""
    command = [spawn.get_executable(), "-c", _MAIN, str(file), *sys.path]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(command, pass_fds=[file], stdin=subprocess.DEVNULL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def work(file: int) -> None:
    """A process's main loop: receive the settings and tasks, and send back (number of the first sample, result)."""
    pipe = Connection(file)
    tasks: SimpleQueue[Task | None] = SimpleQueue()
    with suppress(EOFError, OSError):  # the parent was killed
        settings = pipe.recv()
        threading.Thread(target=_receive, args=(pipe, tasks), daemon=True).start()
        while (task := tasks.get()) is not None:
            number, samples = task
            results: dict[int, Result] = {}
            for _ in _encode_task(number, samples, settings, results):
                pass
            records, error = results[number]
            pipe.send((number, ([record.for_transfer() for record in records], error)))


def _receive(pipe: Connection, tasks: SimpleQueue[Task | None]) -> None:
    """Receive in a thread: a parent that blocks while it sends a task could not take the result before it."""
    try:
        with suppress(EOFError, OSError):  # the parent is done with this process, or was killed
            while True:
                tasks.put(pipe.recv())
    finally:  # also after an error, such as a class that cannot be imported
        tasks.put(None)


def in_order(
    samples: Sequence[Sample], start: int, settings: PrepSettings, pipes: list[Connection]
) -> Iterator[Encoded]:
    """Yield what the processes encode, and this one while it would only wait for them."""
    results: dict[int, Result] = {}
    upcoming = start  # the first sample that no process has been given
    own_task: Iterator[None] | None = None
    free = pipes * TASKS_PER_PROCESS
    for turn in range(start, len(samples), CHUNK):
        end = min(len(samples), turn + (len(pipes) + 1) * MAX_AHEAD * CHUNK)
        while turn not in results:
            while free and upcoming < end:
                free.pop(0).send((upcoming, _task(samples, upcoming)))
                upcoming += CHUNK
            if own_task is None and upcoming < end and not wait(pipes, 0):
                own_task = _encode_task(upcoming, _task(samples, upcoming), settings, results)
                upcoming += CHUNK
            ready = wait(pipes, None if own_task is None else 0)
            for pipe in (pipe for pipe in pipes if pipe in ready):
                number, result = pipe.recv()
                results[number] = result
                free.append(pipe)
            if own_task is not None and next(own_task, own_task) is own_task:
                own_task = None
        records, error = results.pop(turn)
        yield from records
        if error:
            raise error


def _task(samples: Sequence[Sample], first: int) -> list[Sample]:
    return [samples[i] for i in range(first, min(first + CHUNK, len(samples)))]


def _encode_task(
    number: int, samples: list[Sample], settings: PrepSettings, results: dict[int, Result]
) -> Iterator[None]:
    """Put the result of a task into `results[number]`; pauses after each image, so that others can be given tasks."""
    records: list[Encoded] = []
    try:
        for sample in samples:
            records.append(encode(sample, settings))
            yield
        results[number] = records, None
    except InputError as error:
        results[number] = records, error
