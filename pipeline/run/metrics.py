"""metrics.jsonl, and TensorBoard curves of the same lines."""

import io
import json
import resource
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from pipeline.figures import FIGURES
from pipeline.files import atomic_write
from pipeline.recipe import Recipe, dump_recipe

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_BUFFER = 1 << 20  # bytes of lines, some 4,000, that are kept in memory while the disk is full


class MetricsWriter:
    """Appends lines to metrics.jsonl and to TensorBoard, on rank 0. Existing lines beyond `step` are removed.

    Lines that do not fit on a full disk are kept in memory and written later; the curves have a gap then.
    """

    def __init__(self, run_dir: Path, step: int, tensorboard: bool):
        self._run_dir, self._tensorboard = run_dir, tensorboard
        self._open(step)

    def rewind(self, step: int) -> None:
        """Remove the lines beyond an earlier step, and continue from there."""
        self.close()
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
        try:
            self._lines.write(f"{json.dumps(line)}\n".encode())
            self._lines.flush()
            self._add_scalars(line)
        except OSError as error:
            self._failed = True
            return None if before else f"{self._run_dir / 'metrics.jsonl'}: cannot be written to ({error.strerror})"
        return None

    def _add_scalars(self, line: dict[str, Any]) -> None:
        if self._board is None or line["split"] == "event":
            return
        try:
            for name, value in line.items():
                if name not in ("step", "split", "epoch", "time"):
                    self._board.add_scalar(f"{line['split']}/{name}", value, line["step"])
        except OSError:  # its thread ended with this error, at some earlier line
            self._board = self._open_board(None)

    def _open_board(self, purge_step: int | None) -> "SummaryWriter | None":
        if not self._tensorboard:
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._run_dir / "tb"), purge_step=purge_step)

    def add_description(self, recipe: Recipe, environment: dict[str, Any]) -> None:
        """Show the recipe and the environment as text in TensorBoard."""
        if self._board:
            self._board.add_text("recipe", f"```yaml\n{dump_recipe(recipe)}\n```", 0)
            self._board.add_text("environment", f"```json\n{json.dumps(environment, indent=1)}\n```", 0)

    def add_image(self, image: np.ndarray, step: int) -> None:
        """Write a grid of training pictures, uint8 [height, width, 3], to images/, and show it in TensorBoard."""
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "PNG", optimize=True)
        with suppress(OSError):  # a full disk does not stop the run
            (self._run_dir / "images").mkdir(exist_ok=True)
            atomic_write(self._run_dir / "images/first_batch.png", buffer.getvalue())
        if self._board:
            self._board.add_image("train/pictures", image, step, dataformats="HWC")

    def add_result(self, recipe: Recipe, result: dict[str, Any]) -> None:
        """Add the keys that differ from their defaults, and the result, to TensorBoard's table of runs."""
        if self._board:
            settings = {
                f"{section}.{key}": value if isinstance(value, (int, float, str, bool)) else str(value)
                for section, values in recipe.model_dump(
                    mode="json", exclude_defaults=True, exclude={"plugins"}
                ).items()
                for key, value in values.items()
            }
            figures = {f"result/{name}": result[name] for name in FIGURES if name in result}
            self._board.add_hparams(settings, figures, run_name=".")

    def close(self) -> None:
        """Close both files."""
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
