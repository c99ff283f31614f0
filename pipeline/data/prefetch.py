"""Runs an iterator in a background thread, some items ahead; its exceptions reach the consumer."""

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from widemix.errors import InputError

Item = TypeVar("Item")
_END = object()
_POLL = 0.1  # seconds between checks of the stop flag


class Prefetch(Generic[Item]):
    """Iterate over `source` with up to `ahead` items ready. Use it in a `with` block, or call `close`.

    An exception of the source is raised at the next call, before the items that are ready: there may be many. A
    forked process has neither the thread nor a usable queue, whose lock the thread may have held: `InputError`.
    """

    def __init__(self, source: Iterator[Item], ahead: int):
        self._ready: queue.Queue[Any] = queue.Queue(ahead)
        self._stop = threading.Event()
        self._raised: list[BaseException] = []
        self._process = os.getpid()
        self.waited = 0.0  # seconds in which the consumer found no item ready
        # The thread has no reference to self: an iterator that is no longer used is collected, and stops the thread.
        arguments = (source, self._ready, self._raised, self._stop)
        self._thread = threading.Thread(target=_run, args=arguments, daemon=True)
        weakref.finalize(self, self._stop.set)
        self._thread.start()

    def __iter__(self) -> "Prefetch[Item]":
        return self

    def __next__(self) -> Item:
        if self._process != os.getpid():
            raise InputError(
                "this iteration was begun before a fork, by threads of the parent; begin another one here"
            )
        if self._stop.is_set():
            raise StopIteration
        began = time.perf_counter()
        item: Any = _END if self._raised else self._ready.get()
        self.waited += time.perf_counter() - began
        self.check()
        if item is _END:
            self.close()
            raise StopIteration
        return item

    def check(self) -> None:
        """Raise the exception of the source, if there is one."""
        if self._raised:
            self.close()
            raise self._raised[0]

    def __enter__(self) -> "Prefetch[Item]":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and join it. A consumer that waits in another thread is woken by StopIteration."""
        if self._process != os.getpid():
            return
        self._stop.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()  # makes room, so that the thread sees the flag at once
        self._thread.join()
        with contextlib.suppress(queue.Full):  # then the consumer is woken by what is there
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
