"""TensorBoard's event files, drawn from the lines of metrics.jsonl, in the run folder, whose name is shown."""

import itertools
import json
import math
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import FileWriter, SummaryWriter
from torch.utils.tensorboard.summary import hparams

from pipeline.recipe import Recipe, dump_recipe, flat_recipe
from pipeline.run.trackers import figures_of

BY_EPOCH = {"train/loss": "train_loss", "eval/loss": "eval_loss", "eval/top1": "eval_top1"}
# TensorBoard's table of runs sorts figures by name, and accuracy is to come before them.
LOSSES = {"train/loss": "loss/train", "eval/loss": "loss/eval", "eval/ema_loss": "loss/eval_ema"}

_BUFFER = 8 << 20  # bytes of events that are kept in memory while the disk is full
_FILES = itertools.count()  # of this process


class _EventFile:
    """An event file, written by the thread that adds an event.

    torch's own is written by a thread that ends, with a traceback, on a full disk. This one keeps the events in
    memory, as `MetricsWriter` does its lines.
    """

    def __init__(self, run_dir: Path):
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}.{next(_FILES)}"
        self._run_dir = run_dir
        self._file = (run_dir / name).open("wb", buffering=_BUFFER)
        self._records = RecordWriter(self._file)
        self.add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def get_logdir(self) -> str:
        return str(self._run_dir)

    def add_event(self, event: Event) -> None:
        with suppress(OSError):  # more than the buffer holds: the curves have a gap
            self._records.write(event.SerializeToString())

    def flush(self) -> None:
        with suppress(OSError):  # later, when there is space
            self._file.flush()

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


class _Writer(SummaryWriter):
    file_writer: Any
    all_writers: Any

    def _get_file_writer(self) -> FileWriter:
        if self.file_writer is None:
            self.file_writer = FileWriter.__new__(FileWriter)
            self.file_writer.event_writer = _EventFile(Path(self.log_dir))
            self.all_writers = {self.log_dir: self.file_writer}
        return self.file_writer


class Board:
    """Curves, pictures and settings of a run. TensorBoard leaves out what earlier files have from `purge_step` on."""

    def __init__(self, run_dir: Path, purge_step: int | None):
        self._writer = _Writer(str(run_dir))
        if purge_step is not None:
            start = Event(step=purge_step, session_log=SessionLog(status=SessionLog.START))
            self._writer._get_file_writer().add_event(start)

    def add_line(self, line: dict[str, Any]) -> None:
        """Draw the figures of a line by its step and its time; losses and accuracy also by hundredths of an epoch."""
        step, at = line["step"], line.get("time")
        for name, value in figures_of(line).items():
            self._writer.add_scalar(LOSSES.get(name, name), value, step, at)
            if name in BY_EPOCH and "epoch" in line:
                place = round(100 * line["epoch"])
                self._writer.add_scalar(f"over_epochs_x100/{BY_EPOCH[name]}", value, place, at)
        self._writer.flush()

    def add_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Show a picture, uint8 [height, width, 3]."""
        self._writer.add_image(name, image, step, dataformats="HWC")

    def add_description(self, recipe: Recipe, environment: dict[str, Any]) -> None:
        """Show recipe and environment as text, the layout of "custom scalars", and the keys in the table of runs.

        The table has no keys of `log`, which change no number, and no "experiment" summary: TensorBoard then looks
        itself which keys differ between the runs, and shows those first.
        """
        self._writer.add_text("recipe", f"```yaml\n{dump_recipe(recipe)}\n```", 0)
        self._writer.add_text("environment", f"```json\n{json.dumps(environment, indent=1)}\n```", 0)
        self._writer.add_custom_scalars(_layout())
        settings = {name: _plain(value) for name, value in flat_recipe(recipe).items() if name[:4] != "log."}
        _, start, _ = hparams(settings, {})
        self._writer._get_file_writer().add_summary(start)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


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
            "share of the time waiting for data, and of the peak FLOP/s (mfu)": chart("train/data_wait", "train/mfu"),
        },
        "memory": {"peak of rank 0, GiB": chart("train/memory_gb")},
        "gradients and weights": {
            "gradient norm, also by block": chart("train/grad_norm", "train/grad_norm/.*"),
            "weight norm": chart("train/weight_norm"),
        },
    }
