"""Where the metrics of a run go: metrics.jsonl, TensorBoard and the screen."""

import time
from collections.abc import Sequence
from typing import Any

from widemix.metrics import METRICS, main_metric, show_metric
from widemix.progress_line import Display, show_clock, show_rate
from widemix.run.metrics import SUPERSEDED, MetricsWriter
from widemix.run.records import describe_event
from widemix.run.run_dir import Run
from widemix.run.trackers import Tracker


class RunLog:
    """Writes lines to metrics.jsonl and TensorBoard, and prints them; does nothing on ranks other than 0.

    Use it in a `with` block. With `quiet` it prints nothing. `writer` is None on ranks other than 0.
    """

    def __init__(self, run: Run, last_step: int, trackers: Sequence[Tracker] = (), quiet: bool = False):
        self.writer, self._run, step = None, run, run.start.step
        is_main = run.topology.is_main
        if is_main:
            repeats = run.start.evaluates(last_step)
            self.writer = MetricsWriter(run.folder, step, run.recipe.log.tensorboard, trackers, repeats)
        self._progress = Progress(is_main and not quiet, step, last_step, run.verbosity)
        if self.writer and self.writer.superseded:
            many = f"{self.writer.superseded} line{'s' * (self.writer.superseded > 1)} of metrics.jsonl"
            where = run.folder / SUPERSEDED
            self.note(f"{many} from beyond step {step}, which is trained again, moved to {where}")

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        self._progress.close()
        if self.writer:
            for unsent in self.writer.close(failed=kind is not None):
                self._progress.print(f"warning: {unsent}; metrics.jsonl has them")

    def write(self, line: dict[str, Any]) -> None:
        """Write and print a line with split train or eval."""
        self._append(line)
        self._progress.show(line)

    def report_event(self, event: dict[str, Any]) -> None:
        """Write a line with split event, and print a warning; for the keys of `event` see `describe_event`."""
        self._append(event)
        self._warn(describe_event(event))

    def note(self, text: str) -> None:
        """Print a line, unless only warnings are wanted."""
        if self._run.verbosity >= 0:
            self._progress.print(text)

    def record(self, event: dict[str, Any]) -> None:
        """Write a line with split event, and print nothing: the run ends with an error that says it."""
        self._append(event)

    def flush(self) -> None:
        """Write what is in memory; `RunError` if that can't be."""
        if self.writer:
            self.writer.flush()

    def add_description(self) -> None:
        """Show recipe and environment in TensorBoard."""
        if self.writer:
            self.writer.add_description(self._run.recipe, self._run.start.environment)

    def rewind(self, step: int) -> None:
        """Remove the lines beyond an earlier step, and count from there."""
        if self.writer:
            self.writer.rewind(step)
        self._progress.rewind(step)

    def _append(self, line: dict[str, Any]) -> None:
        failed = self.writer.write(line | {"time": round(time.time(), 3)}) if self.writer else None
        if failed is not None:
            self._warn(f"{failed}; its lines are kept in memory until it can")

    def _warn(self, text: str) -> None:
        self._progress.print(f"warning: {text}; training continues")


class Progress:
    """Prints the lines of metrics.jsonl as they are written; with `enabled` false it prints nothing.

    verbosity: -1 prints warnings alone, 1 every line.
    """

    def __init__(self, enabled: bool, first_step: int, last_step: int, verbosity: int = 0):
        self._verbosity = verbosity
        self._last = last_step
        self._began, self._first = time.perf_counter(), first_step
        self._accuracy = ""
        self._display = Display(last_step, first_step, "starting", enabled=enabled, bar=verbosity == 0)

    def show(self, line: dict[str, Any]) -> None:
        """Print a line of split train or eval."""
        if self._verbosity < 0:
            return
        step = line["step"]
        if line["split"] == "eval":
            self._accuracy = f"  {main_metric(line)}"
            shown = [show_metric(name, line[name]) for name in METRICS if name in line and name != "loss"]
            self.print("  ".join([f"step {step}", f"eval loss {line['loss']:.4f}", *shown]))
            return
        seconds = (time.perf_counter() - self._began) / (step - self._first) * (self._last - step)
        left = f"{show_clock(seconds)} left"
        text = (
            f"epoch {line['epoch']:.2f}  step {step}/{self._last}  loss {line['loss']:.4f}  "
            f"{show_rate(line['images_per_s'])} images/s  data wait {100 * line['data_wait']:.0f} %"
        )
        # A narrow terminal cuts the text off that is beside its bar.
        text = f"{left}  {text}{self._accuracy}" if self._display.has_bar else f"{text}  {left}"
        self._display.show(step, text, at_once=self._verbosity > 0 or step == self._last)

    def rewind(self, step: int) -> None:
        """Estimate the remaining time from an earlier step on, after a rollback."""
        self._began, self._first = time.perf_counter(), step

    def print(self, text: str) -> None:
        """Print text above the progress bar."""
        self._display.print(text)

    def close(self) -> None:
        """Leave the progress bar as it is."""
        self._display.close()
