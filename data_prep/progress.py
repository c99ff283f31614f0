"""The progress of a long pass over samples: a bar on a terminal, otherwise a line every ten seconds."""

import sys
import time
from collections.abc import Generator, Iterable
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from widemix.tally import show_clock, show_rate

INTERVAL_S = 10.0  # between lines where there is no terminal

Item = TypeVar("Item")


def print_status(line: str) -> None:
    """Print a line to standard error."""
    print(line, file=sys.stderr, flush=True)


def progress(items: Iterable[Item], total: int, name: str, unit: str = "images", done: int = 0) -> Generator[Item]:
    """Yield the items, and print to standard error how many of `total` have passed, the rate, and the time left.

    `done` of them passed in an earlier process; `unit` is the plural that messages use.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        return _bar(items, total, name, unit, done, console)
    return _lines(items, total, name, unit, done)


def _bar(items: Iterable[Item], total: int, name: str, unit: str, done: int, console: Console) -> Generator[Item]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=total, completed=done, rate="")
        started = time.monotonic()
        for count, item in enumerate(items, start=1):
            yield item
            rate = count / max(time.monotonic() - started, 1e-9)
            bar.update(task, completed=done + count, rate=f"{show_rate(rate)} {unit}/s")


def _lines(items: Iterable[Item], total: int, name: str, unit: str, done: int) -> Generator[Item]:
    first = printed = time.monotonic()
    for count, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        first = now if count == 1 else first  # which also took the start: processes, compilation
        if now - printed < INTERVAL_S:
            continue
        printed, left = now, total - done - count
        pace = ""
        if count > 1 and now > first:
            rate = (count - 1) / (now - first)
            pace = f", {show_rate(rate)} {unit}/s" + (f", {show_clock(left / rate)} left" if left else "")
        print_status(f"{name}: {total - left:,} of {total:,}{pace}")
