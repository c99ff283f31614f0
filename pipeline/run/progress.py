"""What a run prints: a progress bar on rank 0, or a line every few seconds where there is no terminal."""

import sys
import time
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from widemix.metrics import METRICS, main_metric, show_metric
from widemix.tally import show_clock, show_rate

_INTERVAL = 5.0  # seconds between lines without a terminal


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Go on in silence, where rich would end the process: Ctrl-C at `widemix train 2>&1 | tee log` ends tee."""
        self.quiet = True


class Progress:
    """Prints the lines of metrics.jsonl as they are written; with `enabled` false it prints nothing.

    verbosity: -1 prints warnings alone, 1 every line.
    """

    def __init__(self, enabled: bool, first_step: int, last_step: int, verbosity: int = 0):
        self._verbosity = verbosity
        self._console = _Console(file=sys.stderr, quiet=not enabled, soft_wrap=True, markup=False)
        self._last = last_step
        self._began, self._first = time.perf_counter(), first_step
        self._shown = 0.0
        self._accuracy = ""
        self._bar: Bar | None = None
        if enabled and verbosity == 0 and self._console.is_terminal:
            columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Bar(*columns, console=self._console, refresh_per_second=4)
            self._task = self._bar.add_task("starting", total=last_step, completed=first_step)
            self._bar.start()

    def show(self, line: dict[str, Any]) -> None:
        """Print a line of split train or eval."""
        if self._verbosity < 0:
            return
        if line["split"] == "eval":
            self._accuracy = f"  {main_metric(line)}"
            shown = [show_metric(name, line[name]) for name in METRICS if name in line and name != "loss"]
            self.print("  ".join([f"step {line['step']}", f"eval loss {line['loss']:.4f}", *shown]))
            return
        text = (
            f"epoch {line['epoch']:.2f}  step {line['step']}/{self._last}  loss {line['loss']:.4f}  "
            f"{show_rate(line['images_per_s'])} images/s  data wait {100 * line['data_wait']:.0f} %"
        )
        if self._bar:
            self._bar.update(self._task, completed=line["step"], description=text + self._accuracy)
        elif self._is_due() or line["step"] == self._last:
            self._shown = time.perf_counter()
            done = line["step"] - self._first
            left = (time.perf_counter() - self._began) / done * (self._last - line["step"])
            self.print(f"{text}  {show_clock(left)} left")

    def _is_due(self) -> bool:
        return self._verbosity > 0 or time.perf_counter() - self._shown > _INTERVAL

    def rewind(self, step: int) -> None:
        """Estimate the remaining time from an earlier step on, after a rollback."""
        self._began, self._first = time.perf_counter(), step
        if self._bar:
            self._bar.update(self._task, completed=step)

    def print(self, text: str) -> None:
        """Print text above the progress bar."""
        with suppress(OSError):  # a log on a full disk does not stop the run
            self._console.print(text, highlight=False)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar:
            self._bar.stop()
