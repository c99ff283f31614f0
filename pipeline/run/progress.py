"""What a run prints: a progress bar on rank 0, or a line every few seconds where there is no terminal."""

import time
from typing import Any

from widemix.metrics import METRICS, main_metric, show_metric
from widemix.tally import Display, show_clock, show_rate


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
