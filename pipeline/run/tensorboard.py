"""TensorBoard's curves, plotted from the lines of metrics.jsonl, in the run folder, whose name is shown."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import FileWriter, SummaryWriter
from torch.utils.tensorboard.summary import hparams

from widemix.markdown import fenced
from widemix.recipe import Recipe, dump_recipe, flat_recipe
from widemix.run.event_files import BY_EPOCH, Dropped, EventFile
from widemix.run.trackers import metrics_of

OVER_EPOCHS = {"train/loss": "train_loss", "eval/loss": "eval_loss", "eval/top1": "eval_top1"}
# TensorBoard's table of runs sorts metrics by name, and accuracy is to come before them.
LOSSES = {"train/loss": "loss/train", "eval/loss": "loss/eval", "eval/ema_loss": "loss/eval_ema"}

_DESCRIPTION = ("recipe/", "environment/", "custom_scalars__config__", "_hparams_/")  # of `add_description`
_OF_EVALUATIONS = ("eval/", "loss/eval", f"{BY_EPOCH}eval_", "mistakes", "confusion")


class _Writer(SummaryWriter):
    file_writer: Any
    all_writers: Any

    def __init__(self, run_dir: Path, dropped: Dropped | None):
        self.events = EventFile(run_dir, dropped)
        super().__init__(str(run_dir))

    def _get_file_writer(self) -> FileWriter:
        if self.file_writer is None:
            self.file_writer = FileWriter.__new__(FileWriter)
            self.file_writer.event_writer = self.events
            self.all_writers = {self.log_dir: self.file_writer}
        return self.file_writer


class Board:
    """Curves, images and settings of a run, in one event file, with what earlier starts drew but what is `dropped`.

    With `dropped` None it adds a file to theirs.
    """

    def __init__(self, run_dir: Path, dropped: Dropped | None):
        self._writer = _Writer(run_dir, dropped)
        self._places = self._writer.events.places

    def add_line(self, line: dict[str, Any]) -> None:
        """Plot the metrics of a line by its step and its time; losses and accuracy also by hundredths of an epoch.

        Of several lines in a hundredth the first counts.
        """
        step, at = line["step"], line.get("time")
        for name, value in metrics_of(line).items():
            self._writer.add_scalar(LOSSES.get(name, name), value, step, at)
            if name in OVER_EPOCHS and "epoch" in line:
                tag, place = f"{BY_EPOCH}{OVER_EPOCHS[name]}", round(100 * line["epoch"])
                if place > self._places.get(tag, -1):
                    self._places[tag] = place
                    self._writer.add_scalar(tag, value, place, at)
        self._writer.flush()

    def add_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Show an image, uint8 [height, width, 3]."""
        self._writer.add_image(name, image, step, dataformats="HWC")
        self._writer.flush()

    def add_description(self, recipe: Recipe, environment: dict[str, Any]) -> None:
        """Show recipe and environment as text, the layout of "custom scalars", and the keys in the table of runs.

        The table has no keys of `log`, which change no number, and no "experiment" summary: TensorBoard then looks
        itself which keys differ between the runs, and shows those first.
        """
        self._writer.add_text("recipe", fenced(dump_recipe(recipe), "yaml"), 0)
        self._writer.add_text("environment", fenced(json.dumps(environment, indent=1), "json"), 0)
        self._writer.add_custom_scalars(_layout())
        settings = {name: _plain(value) for name, value in flat_recipe(recipe).items() if name[:4] != "log."}
        _, start, _ = hparams(settings, {})
        self._writer._get_file_writer().add_summary(start)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def is_repeated(tag: str, at: int, step: int, evaluates: bool) -> bool:
    """Whether a run that goes on from `step`, and evaluates first, plots this tag of step `at` again."""
    return at > step or tag.startswith(_DESCRIPTION) or (evaluates and at == step and tag.startswith(_OF_EVALUATIONS))


def _plain(value: Any) -> float | str | bool:
    if isinstance(value, (bool, str)):
        return value
    return value if isinstance(value, (int, float)) and math.isfinite(value) else str(value)


def _layout() -> dict[str, dict[str, list[Any]]]:
    """The charts of the tab "custom scalars": the same for all runs, since TensorBoard adds up what differs."""

    def chart(*tags: str) -> list[Any]:
        return ["Multiline", list(tags)]

    return {
        "training": {"loss": chart("loss/train"), "learning rate": chart("train/lr")},
        "evaluation": {
            "top-1": chart("eval/top1", "eval/ema_top1"),
            "top-5": chart("eval/top5", "eval/ema_top5"),
            "loss": chart("loss/eval", "loss/eval_ema"),
        },
        "by epoch (in hundredths)": {
            "loss": chart("over_epochs_x100/train_loss", "over_epochs_x100/eval_loss"),
            "top-1": chart("over_epochs_x100/eval_top1"),
        },
        "speed": {
            "samples per second": chart("train/images_per_s"),
            "fraction of the time waiting for data, and of the peak FLOP/s (mfu)": chart(
                "train/data_wait", "train/mfu"
            ),
        },
        "memory": {"peak of rank 0, GiB": chart("train/memory_gib")},
        "gradients and weights": {
            "gradient norm, also by block": chart("train/grad_norm", "train/grad_norm/.*"),
            "weight norm": chart("train/weight_norm"),
        },
    }
