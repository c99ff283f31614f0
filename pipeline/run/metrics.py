"""The record of a run: metrics.jsonl, and TensorBoard drawn from the same lines."""

import json
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pipeline.recipe import Recipe, dump_recipe

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_WAITING = 1 << 20  # bytes of lines that a full disk may keep waiting: some 4,000 lines


class Record:
    """Lines of metrics.jsonl and their curves, on rank 0. Lines beyond `step` belong to a run that was cut off.

    Lines that a full disk does not take are written as soon as it does; the curves have a gap then.
    """

    def __init__(self, run: Path, step: int, tensorboard: bool):
        self._run, self._tensorboard = run, tensorboard
        self._open(step)

    def rewind(self, step: int) -> None:
        """Go on from an earlier step: lines beyond it are taken back."""
        self.close()
        self._open(step)

    def _open(self, step: int) -> None:
        path = self._run / "metrics.jsonl"
        if path.exists():
            kept = [line for line in path.read_bytes().splitlines() if _step_of(line) <= step]
            shadow = path.with_name(".metrics.jsonl")
            shadow.write_bytes(b"".join(line + b"\n" for line in kept))
            shadow.rename(path)
        self._lines = path.open("ab", buffering=_WAITING)
        self._failed = False
        self._board = self._opened_board(step + 1 if step else None)

    def write(self, line: dict[str, Any]) -> str | None:
        """Add a line. Why it has to wait, told when the first one does."""
        before, self._failed = self._failed, False
        try:
            self._lines.write(f"{json.dumps(line)}\n".encode())
            self._lines.flush()
            self._draw(line)
        except OSError as error:
            self._failed = True
            return None if before else f"{self._run / 'metrics.jsonl'}: cannot be written to ({error.strerror})"
        return None

    def _draw(self, line: dict[str, Any]) -> None:
        if self._board is None or line["split"] == "event":
            return
        try:
            for name, value in line.items():
                if name not in ("step", "split", "epoch"):
                    self._board.add_scalar(f"{line['split']}/{name}", value, line["step"])
        except OSError:  # its thread has ended with this, at some line before
            self._board = self._opened_board(None)

    def _opened_board(self, purge_step: int | None) -> "SummaryWriter | None":
        if not self._tensorboard:
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._run / "tb"), purge_step=purge_step)

    def describe(self, recipe: Recipe, environment: dict[str, Any]) -> None:
        """The recipe and the environment as text."""
        if self._board:
            self._board.add_text("recipe", f"```yaml\n{dump_recipe(recipe)}\n```", 0)
            self._board.add_text("environment", f"```json\n{json.dumps(environment, indent=1)}\n```", 0)

    def picture(self, grid: np.ndarray, step: int) -> None:
        """A grid of training pictures, uint8 [height, width, 3]."""
        if self._board:
            self._board.add_image("train/pictures", grid, step, dataformats="HWC")

    def finish(self, recipe: Recipe, result: dict[str, Any]) -> None:
        """What the recipe sets beside its result, for TensorBoard's table of runs."""
        if self._board:
            settings = {
                f"{section}.{key}": value if isinstance(value, (int, float, str, bool)) else str(value)
                for section, values in recipe.model_dump(mode="json", exclude_defaults=True).items()
                for key, value in values.items()
            }
            figures = {f"result/{name}": result[name] for name in ("top1", "top5", "loss")}
            self._board.add_hparams(settings, figures, run_name=".")

    def close(self) -> None:
        self._lines.close()
        if self._board:
            self._board.close()


def weight_norm(module: nn.Module) -> float:
    """The Euclidean norm of all weights together. Every rank calls it: the weights may be shared out."""
    norm = nn.utils.get_total_norm([p.detach() for p in module.parameters()])
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def peak_memory(device: torch.device) -> float:
    """GiB at most so far: of the GPU's allocations, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _step_of(line: bytes) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # the last line of a run that was killed while writing it
        return float("inf")
