"""Runs an iterator on a thread, some items ahead: nothing it raises is lost, and it ends when its reader does."""

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
_END = object()
_POLL = 0.1  # seconds between looks at the stop flag


class Prefetch(Generic[Item]):
    """Iterate over `source` with up to `ahead` items ready. Use it in a `with` block, or call `close`.

    What the source raises is raised here at the next item asked for, before those that are ready: they may last long.
    """

    def __init__(self, source: Iterator[Item], ahead: int):
        self._ready: queue.Queue[Any] = queue.Queue(ahead)
        self._stop = threading.Event()
        self._raised: list[BaseException] = []
        self.waited = 0.0  # seconds in which the reader found nothing ready
        # The thread holds no reference to self: an iterator that was dropped is collected, and stops the thread.
        words = (source, self._ready, self._raised, self._stop)
        self._thread = threading.Thread(target=_run, args=words, daemon=True)
        weakref.finalize(self, self._stop.set)
        self._thread.start()

    def __iter__(self) -> "Prefetch[Item]":
        return self

    def __next__(self) -> Item:
        if self._stop.is_set():
            raise StopIteration
        asked = time.perf_counter()
        item: Any = _END if self._raised else self._ready.get()
        self.waited += time.perf_counter() - asked
        self.check()
        if item is _END:
            self.close()
            raise StopIteration
        return item

    def check(self) -> None:
        """Raise what the source has raised, if it has."""
        if self._raised:
            self.close()
            raise self._raised[0]

    def __enter__(self) -> "Prefetch[Item]":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and return once it is gone. A reader that waits in yet another thread is woken."""
        self._stop.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()  # so that the thread need not wait for room to see the flag
        self._thread.join()
        with contextlib.suppress(queue.Full):  # then there is something to wake up to
            self._ready.put_nowait(_END)


def _run(source: Iterator, ready: queue.Queue, raised: list[BaseException], stop: threading.Event) -> None:
    try:
        for item in source:
            if not _put(ready, item, stop):
                return
    except BaseException as error:
        raised.append(error)
    _put(ready, _END, stop)


def _put(ready: queue.Queue, entry: Any, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            ready.put(entry, timeout=_POLL)
            return True
        except queue.Full:
            continue
    return False
