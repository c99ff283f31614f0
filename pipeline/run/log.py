"""Where the metrics of a run go: metrics.jsonl, TensorBoard and the screen."""

import time
from collections.abc import Sequence
from typing import Any

from widemix.run.events import describe_event
from widemix.run.metrics import SUPERSEDED, MetricsWriter
from widemix.run.progress import Progress
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
