"""Says on stderr how far a long work is, where it takes more than a moment."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Timer
from typing import TypeVar

T = TypeVar("T")
_INTERVAL = 5.0  # seconds between lines


class Tally:
    """Says on stderr how many of `total` are done: from `after` seconds on, every few seconds, and at the end."""

    def __init__(self, what: str, total: int, after: float = 2.0, enabled: bool = True):
        self._what, self._total, self._enabled = what, total, enabled
        self._done = 0
        self._shown = time.perf_counter() - _INTERVAL + after
        self._said = False

    def add(self, number: int = 1) -> None:
        """Count so many more."""
        self._done += number
        ended = self._done >= self._total and self._said
        if self._enabled and (ended or time.perf_counter() - self._shown > _INTERVAL):
            self._shown, self._said = time.perf_counter(), True
            print(f"{self._what}: {self._done} of {self._total}", file=sys.stderr, flush=True)


def show_rate(rate: float) -> str:
    """A number of things per second as text: two digits where it has less than two before the point."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def show_clock(seconds: float) -> str:
    """A duration as h:mm:ss."""
    return f"{int(seconds // 3600)}:{int(seconds % 3600 // 60):02d}:{int(seconds % 60):02d}"


@contextmanager
def announce(what: str, after: float = 2.0) -> Iterator[None]:
    """Say on stderr what the block is doing, if it takes more than `after` seconds."""
    timer = Timer(after, print, [what], {"file": sys.stderr, "flush": True})
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def track(items: Sequence[T], what: str, after: float = 2.0) -> Iterator[T]:
    """Yield the items, and count those that are done by a `Tally`."""
    tally = Tally(what, len(items), after)
    for item in items:
        yield item
        tally.add()
