"""How far a long pass over samples is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Generator, Iterable
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 10.0  # seconds between lines where there is no terminal

Item = TypeVar("Item")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def progress(items: Iterable[Item], total: int, name: str, unit: str = "images", done: int = 0) -> Generator[Item]:
    """The items, while standard error shows how many of `total` have passed, at what rate, and the time left.

    `done` of them had passed before.
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
            bar.update(task, completed=done + count, rate=f"{rate:,.0f} {unit}/s")


def _lines(items: Iterable[Item], total: int, name: str, unit: str, done: int) -> Generator[Item]:
    started = said = time.monotonic()
    for count, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - said >= EVERY:
            said, rate = now, count / (now - started)
            left = total - done - count
            say(f"{name}: {total - left:,} of {total:,}, {rate:,.0f} {unit}/s, {left / rate:,.0f} s left")
