"""TensorBoard's curves, plotted from the lines of metrics.jsonl, in the run folder, whose name is shown.

TensorBoard plots one event file after the other, in the order of their names: steps that were trained twice would be
plotted twice. So each start writes a new file that begins with what is kept of the others, and removes those.
"""

import io
import itertools
import json
import math
import os
import platform
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import FileWriter, SummaryWriter
from torch.utils.tensorboard.summary import hparams

from widemix.errors import InputError
from widemix.files import open_to_write, refuse_links
from widemix.lock import HeldFolder, hold
from widemix.markdown import fenced
from widemix.recipe import Recipe, dump_recipe, flat_recipe
from widemix.run import checkpoint
from widemix.run.trackers import metrics_of

BY_EPOCH = "over_epochs_x100/"  # tags whose steps are hundredths of an epoch begin so
Dropped = Callable[[str, int], bool]  # of a tag and the step of its line

_PREFIX = "events.out.tfevents."
_BUFFER = 8 << 20  # bytes of events that are kept in memory while the disk is full
_FILES = itertools.count()  # of this process


class EventFile:
    """A new event file with what is kept of those in the run folder, which it replaces. `places`: the last step of
    each tag by hundredths of an epoch. With `dropped` None those, of which another process may write one, stay.

    It is written by the thread that adds an event. torch's own is written by a thread that ends, with a traceback, on
    a full disk. This one keeps the events in memory, as `MetricsWriter` does its lines.
    """

    def __init__(self, run_dir: Path, dropped: Dropped | None):
        self._run_dir = run_dir
        earlier = sorted(run_dir.glob(f"{_PREFIX}*"))
        # After those that are there, whatever the clock says.
        seconds = max([int(time.time()), *(_seconds(path) + 1 for path in earlier)])
        path = run_dir / f"{_PREFIX}{seconds:010d}.{platform.node()}.{os.getpid()}.{next(_FILES)}"
        hidden = path.with_name(f".{path.name}")
        for stale in run_dir.glob(f".{_PREFIX}*") if dropped else ():  # of a start that was killed while it wrote one
            stale.unlink()
        self._file = open_to_write(hidden, "wb", _BUFFER)
        self._records = RecordWriter(self._file)
        self.add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self.places: dict[str, int] = {}
        if dropped:
            self._replace(earlier, dropped)
        hidden.rename(path)
        for replaced in earlier if dropped else ():
            replaced.unlink()

    def _replace(self, earlier: list[Path], dropped: Dropped) -> None:
        """Write what is kept of earlier files, of which TensorBoard then leaves out all from step 0 on."""
        self.add_event(Event(wall_time=time.time(), step=0, session_log=SessionLog(status=SessionLog.START)))
        for (tag, step), record in _kept(earlier, dropped).items():
            self._file.write(record)
            if tag.startswith(BY_EPOCH):
                self.places[tag] = step
        if earlier:
            self._file.flush()
            os.fsync(self._file.fileno())

    def get_logdir(self) -> str:
        """Return the run folder; torch's FileWriter asks for it."""
        return str(self._run_dir)

    def add_event(self, event: Event) -> None:
        """Write an event, or keep it in memory."""
        with suppress(OSError):  # more than the buffer holds: the curves have a gap
            self._records.write(event.SerializeToString())

    def flush(self) -> None:
        """Write what is in memory, if there is space."""
        with suppress(OSError):  # later, when there is space
            self._file.flush()

    def close(self) -> None:
        """Write what is in memory, if there is space, and close the file."""
        with suppress(OSError):
            self._file.close()


def _kept(paths: list[Path], dropped: Dropped) -> dict[tuple[str, int], bytes]:
    """The records that are not dropped, by tag and step, the last of each, in the order of their lines."""
    found: dict[tuple[str, int], tuple[int, bytes]] = {}  # with the step of the line
    for path in paths:
        line = 0
        for event, record in _events(path):
            if event.session_log.status == SessionLog.START:
                found = {place: known for place, known in found.items() if known[0] < event.step}
            for tag in [value.tag for value in event.summary.value][:1]:
                if not tag.startswith(BY_EPOCH):  # those follow the other metrics of their line
                    line = event.step
                found.pop((tag, event.step), None)
                found[tag, event.step] = line, record
    ordered = sorted(found.items(), key=lambda item: item[1][0])
    return {(tag, step): record for (tag, step), (line, record) in ordered if not dropped(tag, line)}


def _events(path: Path) -> Iterator[tuple[Event, bytes]]:
    """The events of a file, each with its record (length, data, checksums), up to the first that is damaged."""
    data, place = path.read_bytes(), 0
    while place + 12 <= len(data):
        begin, end = place + 12, place + 12 + struct.unpack_from("<Q", data, place)[0]
        if end + 4 > len(data):
            return
        ends_file = end + 20 > len(data)  # a killed run tears the last record; the checksum of each takes too long
        if ends_file and struct.pack("<I", masked_crc32c(data[begin:end])) != data[end : end + 4]:
            return
        try:
            event = Event.FromString(data[begin:end])
        except DecodeError:
            return
        yield event, data[place : end + 4]
        place = end + 4


def _seconds(path: Path) -> int:
    """The time in a file's name, s since 1970."""
    text = path.name.removeprefix(_PREFIX).partition(".")[0]
    return int(text) if text.isdecimal() else 0


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


def add_to_tensorboard(images: Mapping[str, bytes], run: Path) -> Path:
    """Add PNG files as `analysis/NAME` at a run's newest step; returns the folder of its event files.

    They replace those of the same name and step, but not while the run is trained: its own file is left alone.
    """
    from PIL import Image  # and not where a rank starts

    try:
        step = checkpoint.find(run).position.step
    except InputError:  # it has no checkpoint yet
        step = 0
    tags = {
        f"analysis/{name}": np.asarray(Image.open(io.BytesIO(png)).convert("RGB")) for name, png in images.items()
    }
    refuse_links(run, HeldFolder.links)
    with ExitStack() as stack:
        dropped = None
        with suppress(InputError):
            stack.enter_context(hold(run, wait_s=0))
            dropped = lambda tag, at: tag in tags and at == step  # noqa: E731
        board = stack.enter_context(closing(Board(run, dropped)))
        for tag, pixels in tags.items():
            board.add_image(tag, pixels, step)
    return run
