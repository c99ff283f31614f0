"""metrics.jsonl, and TensorBoard curves of the same lines."""

import io
import json
import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from pipeline.files import atomic_write
from pipeline.recipe import Recipe
from pipeline.run.trackers import Tracker

if TYPE_CHECKING:
    from pipeline.run.tensorboard import Board

_BUFFER = 1 << 20  # bytes of lines, some 4,000, that are kept in memory while the disk is full


class MetricsWriter:
    """Appends lines to metrics.jsonl, to TensorBoard and to trackers, on rank 0. Lines beyond `step` are removed.

    Lines that do not fit on a full disk are kept in memory and written later.
    """

    def __init__(self, run_dir: Path, step: int, tensorboard: bool, trackers: Sequence[Tracker] = ()):
        self._run_dir, self._tensorboard, self._trackers = run_dir, tensorboard, trackers
        self._open(step)

    def rewind(self, step: int) -> None:
        """Remove the lines beyond an earlier step, and continue from there. Trackers keep them."""
        self._close_files()
        self._open(step)

    def _open(self, step: int) -> None:
        path = self._run_dir / "metrics.jsonl"
        if path.exists():
            kept = [line for line in path.read_bytes().splitlines() if _step_of(line) <= step]
            atomic_write(path, "".join(f"{line.decode()}\n" for line in kept))
        self._lines = path.open("ab", buffering=_BUFFER)
        self._failed = False
        self._board = self._open_board(step + 1 if step else None)

    def write(self, line: dict[str, Any]) -> str | None:
        """Append a line; return why it cannot be written yet, if it is the first of several that cannot."""
        before, self._failed = self._failed, False
        if self._board:
            self._board.add_line(line)
        for tracker in self._trackers:
            tracker.add_line(line)
        try:
            self._lines.write(f"{json.dumps(line)}\n".encode())
            self._lines.flush()
        except OSError as error:
            self._failed = True
            return None if before else f"{self._run_dir / 'metrics.jsonl'}: cannot be written to ({error.strerror})"
        return None

    def _open_board(self, purge_step: int | None) -> "Board | None":
        if not self._tensorboard:
            return None
        from pipeline.run.tensorboard import Board

        return Board(self._run_dir, purge_step)

    def add_description(self, recipe: Recipe, environment: dict[str, Any]) -> None:
        """Show recipe and environment in TensorBoard."""
        if self._board:
            self._board.add_description(recipe, environment)

    def add_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Write a picture, uint8 [height, width, 3], to images/NAME.png, and show it in TensorBoard."""
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "PNG", optimize=True)
        with suppress(OSError):  # a full disk does not stop the run
            (self._run_dir / "images").mkdir(exist_ok=True)
            atomic_write(self._run_dir / f"images/{name}.png", buffer.getvalue())
        self.show(name, image, step)

    def show(self, name: str, image: np.ndarray, step: int) -> None:
        """Show a picture, uint8 [height, width, 3], in TensorBoard alone."""
        if self._board:
            self._board.add_image(name, image, step)

    def write_confusion(self, confusion: dict[str, Any]) -> None:
        """Write confusion.json."""
        with suppress(OSError):
            atomic_write(self._run_dir / "confusion.json", json.dumps(confusion) + "\n")

    def close(self, failed: bool = False) -> list[str]:
        """Close the files, and tell the trackers whether the run has failed; return what they could not send."""
        self._close_files()
        return [unsent for tracker in self._trackers if (unsent := tracker.close(failed))]

    def _close_files(self) -> None:
        self._lines.close()
        if self._board:
            self._board.close()


def peak_memory(device: torch.device) -> float:
    """Return the peak memory so far in GiB: of torch's allocations on a GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _step_of(line: bytes) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # the last line of a run that was killed while writing
        return float("inf")
