"""Says on stderr how far a long work is: beside a bar on a terminal, in a log by a line every few seconds."""

import os
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import Timer
from typing import TypeVar

import rich.console
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.segment import Segment

from widemix.terminal import print, visible

T = TypeVar("T")
_LINES, _REDRAWN = 5.0, 0.1  # seconds between lines, and between changes of a bar


def print_status(line: str) -> None:
    """Print a line to standard error."""
    print(line, file=sys.stderr, flush=True)


class Console(rich.console.Console):
    """A console that shows the control characters of what is printed, its own excepted."""

    def render(
        self, renderable: RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield the parts of what is printed; rich calls it for the cells of a table too."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


class _Quiet(Console):
    def on_broken_pipe(self) -> None:
        """Go on in silence, where rich would end the process: Ctrl-C at `widemix train 2>&1 | tee log` ends tee."""
        self.quiet = True


class Display:
    """A text on stderr about a work of `total` that is renewed as it goes on.

    done: where it begins. enabled: false shows nothing. bar: false prints lines on a terminal too. No thread redraws
    the bar, since processes are forked and loaders timed while it is shown. To be closed.
    """

    def __init__(self, total: int, done: int = 0, text: str = "", enabled: bool = True, bar: bool = True):
        terminal = sys.stderr.isatty()  # rich takes FORCE_COLOR, which services set for their logs, as one too
        self._console = _Quiet(
            file=sys.stderr, quiet=not enabled, soft_wrap=True, markup=False, emoji=False, force_terminal=terminal
        )
        self._shown = -_LINES
        self._bar: Progress | None = None
        if enabled and bar and terminal and not self._console.is_dumb_terminal:
            columns = (BarColumn(self._console.width // 6), TextColumn("{task.description}", markup=False))
            # Lines that are printed meanwhile appear above it; those of a stdout that is a file go to the file.
            to_terminal = sys.stdout is not None and sys.stdout.isatty()
            self._bar = Progress(*columns, console=self._console, auto_refresh=False, redirect_stdout=to_terminal)
            self._task = self._bar.add_task(text, total=total, completed=done)
            with suppress(OSError):
                self._bar.start()

    @property
    def has_bar(self) -> bool:
        """Whether there is a bar: otherwise each text is a line of its own."""
        return self._bar is not None

    def show(self, done: int, text: str, at_once: bool = False) -> None:
        """Renew the text: at once, or where it is time for it."""
        if self._bar:
            room = self._console.width * 5 // 6 - 2  # beside the bar, which rich shortens for a longer text
            self._bar.update(self._task, completed=done, description=text[:room])
        now = time.perf_counter()
        if not at_once and now - self._shown < (_REDRAWN if self._bar else _LINES):
            return
        self._shown = now
        if not self._bar:
            self.print(text)
            return
        with suppress(OSError):  # the terminal has been closed
            self._bar.refresh()

    def print(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        with suppress(OSError):  # a log on a full disk does not stop the run
            self._console.print(text, highlight=False)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar:
            with suppress(OSError):
                self._bar.stop()


class ProgressLine:
    """Shows how many of `total` are done, their rate, and the time left: from `after` seconds on, and at the end.

    unit: the plural that the rate uses. done: how many of them an earlier process has done. Use it in a `with` block.
    """

    def __init__(
        self, what: str, total: int, unit: str = "samples", done: int = 0, after: float = 2.0, enabled: bool = True
    ):
        self._what, self._total, self._unit, self._enabled = what, total, unit, enabled
        self._done, self._begins = done, time.perf_counter() + after
        self._first: tuple[int, float] | None = None  # done and when, after the first, which also took the start
        self._display: Display | None = None

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_) -> None:
        if self._display:
            self._display.close()

    def add(self, number: int = 1) -> None:
        """Count so many more."""
        self._done += number
        if not self._enabled:
            return
        now = time.perf_counter()
        self._first = self._first or (self._done, now)
        if self._display is None and now >= self._begins:
            self._display = Display(self._total, self._done)
        if self._display:
            self._display.show(self._done, self._text(now), at_once=self._done >= self._total)

    def _text(self, now: float) -> str:
        assert self._first is not None
        text, left = f"{self._what}: {self._done:,} of {self._total:,}", self._total - self._done
        done, began = self._first
        if self._done == done or now <= began:
            return text
        rate = (self._done - done) / (now - began)
        return f"{text}, {show_rate(rate)} {self._unit}/s" + (f", {show_clock(left / rate)} left" if left > 0 else "")


def show_rate(rate: float) -> str:
    """A number of things per second as text: two digits where it has less than two before the point."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def show_clock(seconds: float) -> str:
    """A duration as h:mm:ss."""
    return f"{int(seconds // 3600)}:{int(seconds % 3600 // 60):02d}:{int(seconds % 60):02d}"


@contextmanager
def announce(what: str, after: float = 2.0) -> Iterator[None]:
    """Say on stderr what the block is doing, if it takes more than `after` seconds."""
    timer = Timer(after, print_status, [what])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def announce_import() -> AbstractContextManager[None]:
    """On a terminal: say that PyTorch is being imported, if it takes long; one rank says it."""
    said = sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
    return announce("importing PyTorch", after=5.0) if said else nullcontext()


def track(items: Iterable[T], what: str, total: int, unit: str = "samples", done: int = 0) -> Generator[T]:
    """Yield the items, and count those that are done by a `ProgressLine`."""
    with ProgressLine(what, total, unit, done) as progress:
        for item in items:
            yield item
            progress.add()
