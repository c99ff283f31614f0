"""metrics.jsonl, and TensorBoard curves of the same lines."""

import io
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from widemix.errors import RunError, cure_of
from widemix.files import atomic_write, parse_json, read_regular
from widemix.processes import peak_resident_bytes
from widemix.recipe import Recipe
from widemix.run.trackers import Tracker

if TYPE_CHECKING:
    from widemix.run.tensorboard import Board

SUPERSEDED = "metrics.superseded.jsonl"  # lines of steps that were trained again, the last moved ones last
_BUFFER = 1 << 20  # bytes of lines, some 4,000, that are kept in memory while the disk is full


class MetricsWriter:
    """Appends lines to metrics.jsonl, to TensorBoard and to trackers, on rank 0, from `step` on.

    Lines beyond `step`, of steps that are trained again, move to metrics.superseded.jsonl; with `evaluates` those of
    the evaluation at `step` too, which is repeated. `superseded` counts them. Lines that do not fit on a full disk
    are kept in memory and written later.
    """

    def __init__(
        self,
        run_dir: Path,
        step: int,
        tensorboard: bool,
        trackers: Sequence[Tracker] = (),
        evaluates: bool = False,
    ):
        self._run_dir, self._tensorboard, self._trackers = run_dir, tensorboard, trackers
        self._description: tuple[Recipe, dict[str, Any]] | None = None
        self.superseded = 0
        self._open(step, evaluates)

    def rewind(self, step: int) -> None:
        """Continue from an earlier step. Trackers keep the lines beyond it."""
        self._close_files()
        self._open(step)

    def _open(self, step: int, evaluates: bool = False) -> None:
        path = self._run_dir / "metrics.jsonl"
        if path.exists():
            kept: list[bytes] = []
            superseded: list[bytes] = []
            for line in read_regular(path).splitlines(keepends=True):
                at, split = _place_of(line)
                stays = at < step or (at == step and not (evaluates and split == "eval"))
                (kept if stays else superseded).append(line)
            if superseded:
                self.superseded += len(superseded)
                _append(self._run_dir / SUPERSEDED, superseded)
                atomic_write(path, b"".join(kept))
        self._lines = path.open("ab", buffering=_BUFFER)
        self._failed = False
        self._board = self._open_board(step, evaluates)

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

    def _open_board(self, step: int, evaluates: bool) -> "Board | None":
        if not self._tensorboard:
            return None
        from widemix.run.tensorboard import Board, is_repeated

        board = Board(self._run_dir, partial(is_repeated, step=step, evaluates=evaluates))
        if self._description:
            board.add_description(*self._description)
        return board

    def add_description(self, recipe: Recipe, environment: dict[str, Any]) -> None:
        """Show recipe and environment in TensorBoard."""
        self._description = recipe, environment
        if self._board:
            self._board.add_description(recipe, environment)

    def add_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Write an image, uint8 [height, width, 3], to images/NAME.png, and show it in TensorBoard."""
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "PNG")
        with suppress(OSError):  # a full disk does not stop the run
            (self._run_dir / "images").mkdir(exist_ok=True)
            atomic_write(self._run_dir / f"images/{name}.png", buffer.getvalue())
        self.show(name, image, step)

    def show(self, name: str, image: np.ndarray, step: int) -> None:
        """Show an image, uint8 [height, width, 3], in TensorBoard alone."""
        if self._board:
            self._board.add_image(name, image, step)

    def write_confusion(self, confusion: dict[str, Any]) -> None:
        """Write confusion.json."""
        with suppress(OSError):
            atomic_write(self._run_dir / "confusion.json", json.dumps(confusion) + "\n")

    def flush(self) -> None:
        """Write what is in memory; `RunError` if that can't be."""
        try:
            self._lines.flush()
        except OSError as error:
            raise RunError(
                f"{self._run_dir / 'metrics.jsonl'}: lacks its last lines ({error.strerror}); "
                f"{cure_of(error)}, and start the same command again: it goes on from the newest checkpoint"
            ) from None

    def close(self, failed: bool = False) -> list[str]:
        """Close the files, and tell the trackers whether the run has failed; return what they could not send."""
        self._close_files()
        return [unsent for tracker in self._trackers if (unsent := tracker.close(failed))]

    def _close_files(self) -> None:
        with suppress(OSError):  # what `write` has warned of, and `flush` raised
            self._lines.close()
        if self._board:
            self._board.close()


def peak_memory(device: torch.device) -> float:
    """Return the peak memory so far in GiB: of torch's allocations on a GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return peak_resident_bytes() / 2**30


def _place_of(line: bytes) -> tuple[float, str | None]:
    """Step and split of a line; beyond all steps for one that is damaged, as the last of a run that was killed."""
    try:
        content = parse_json(line)
        return content["step"], content.get("split")
    except (ValueError, KeyError, TypeError):
        return float("inf"), None


def _append(path: Path, lines: Sequence[bytes]) -> None:
    """Append lines, each with its end, and flush them to disk."""
    with path.open("ab") as file:
        file.writelines(line if line.endswith(b"\n") else line + b"\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
