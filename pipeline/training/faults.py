"""Failed steps: the loss and gradient norm of every step are checked, and a run may roll back to its last checkpoint
and skip the data of the steps that failed."""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from widemix.distributed.topology import Topology, on_main
from widemix.errors import RunError
from widemix.recipe.sections import FaultsSection
from widemix.run import checkpoint
from widemix.run.checkpoint import Checkpoint
from widemix.run.resume import write_skipped_ranges

_LOSSES, _FEWEST_LOSSES = 100, 20  # of steps before: as many as a spike is measured against, and how many that needs
_MAX_OVERFLOWS = 20  # in a row, while fp16 searches for its loss scale: from 2^16 it is below 1 then
_ADVICE = "lower optim.lr, lengthen schedule.warmup_epochs or set optim.clip_grad"


class Diverged(RunError):
    """More steps in a row have failed than allowed; they consumed data steps `first` to `stop`, which is excluded."""

    def __init__(self, text: str, first: int, stop: int):
        super().__init__(text)
        self.first, self.stop = first, stop


@dataclass(frozen=True)
class StepMetrics:
    """The loss and gradient norm of a step, over all ranks, and the data step that it consumed."""

    step: int
    data_step: int
    loss: float
    grad_norm: float


class HealthMonitor:
    """Checks every step in turn. All ranks have the same metrics and so come to the same results."""

    def __init__(self, section: FaultsSection, fp16: bool):
        self.section, self.fp16 = section, fp16
        self._failed: list[StepMetrics] = []  # in a row, up to the last step checked
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._overflows = 0  # of fp16, in a row

    @property
    def failing(self) -> bool:
        """Whether the last step failed; no checkpoint should be saved then."""
        return bool(self._failed)

    def reset(self) -> None:
        """Forget all steps, as after a rollback."""
        self._failed.clear()
        self._losses.clear()
        self._overflows = 0

    def check_steps(self, steps: Sequence[StepMetrics]) -> list[dict[str, Any]]:
        """Return events (`widemix.run.records.describe_event`) of steps that failed or whose loss spiked.

        Raises `Diverged` when more than `faults.max_skipped_steps` in a row have failed.
        """
        events = []
        for step in steps:
            if self._fails(step):
                self._failed.append(step)
                events.append(_event("step_skipped", step, grad_norm=_json_number(step.grad_norm)))
                continue
            self._raise_if_diverged()
            self._failed.clear()
            expected = self._mean_if_spike(step.loss)
            if expected is not None:
                events.append(_event("loss_spike", step, expected=round(expected, 6)))
            self._losses.append(step.loss)
        self._raise_if_diverged()
        return events

    def _raise_if_diverged(self) -> None:
        if len(self._failed) <= self.section.max_skipped_steps:
            return
        first, last = self._failed[0], self._failed[-1]
        what, value = ("gradient norm", first.grad_norm) if math.isfinite(first.loss) else ("loss", first.loss)
        raise Diverged(f"the {what} is {value:g} at step {first.step}", first.data_step, last.data_step + 1)

    def _fails(self, step: StepMetrics) -> bool:
        """Whether loss or gradient are not finite. In fp16 some overflows are normal: they set the loss scale."""
        overflows = not math.isfinite(step.grad_norm)
        self._overflows = self._overflows + 1 if overflows and self.fp16 else 0
        return not math.isfinite(step.loss) or (overflows and not 0 < self._overflows <= _MAX_OVERFLOWS)

    def _mean_if_spike(self, loss: float) -> float | None:
        """Return the mean of the losses before, if this one is a spike."""
        if self.section.loss_spike_std is None or len(self._losses) < _FEWEST_LOSSES:
            return None
        mean = statistics.fmean(self._losses)
        deviation = math.sqrt(statistics.fmean((loss - mean) ** 2 for loss in self._losses))
        return mean if loss > mean + self.section.loss_spike_std * deviation else None


class GradientWatch:
    """Whether the gradient of each step was finite. All ranks get the same answer: its norm is over all of them.

    On a GPU the answer is that of two steps before, which has been copied behind that step, so that the host does not
    wait for what the device still has to compute.
    """

    def __init__(self, device: torch.device):
        self._behind = 2 if device.type == "cuda" else 0
        self._finite: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def failed(self, grad_norm: torch.Tensor) -> bool:
        """Add a step by its gradient's norm, a tensor [] on the device; return whether the one that is due failed."""
        finite, event = grad_norm.isfinite().to("cpu", non_blocking=True), None
        if self._behind:
            event = torch.cuda.Event()
            event.record()
        self._finite.append((finite, event))
        if len(self._finite) <= self._behind:
            return False
        finite, event = self._finite.popleft()
        if event:
            event.synchronize()
        return not finite

    def reset(self) -> None:
        """Forget all steps, as after a rollback."""
        self._finite.clear()


class Rollback:
    """The data steps that a run skips, and how often it may still roll back. Every rank has one.

    `skipped_ranges` are (first, stop) of data steps, one range for each rollback so far, earlier starts included; the
    run folder keeps them in skipped_ranges.json.
    """

    def __init__(
        self, run_dir: Path, topology: Topology, max_rollbacks: int, skipped_ranges: Iterable[tuple[int, int]]
    ):
        self._run_dir, self._topology, self._max_rollbacks = run_dir, topology, max_rollbacks
        self.skipped_ranges = list(skipped_ranges)

    def next_used(self, data_step: int) -> int:
        """Return `data_step`, or the first one after it that is not skipped."""
        for first, stop in sorted(self.skipped_ranges):
            if first <= data_step < stop:
                data_step = stop
        return data_step

    def next_skipped(self, data_step: int) -> int | None:
        """Return the first data step from `data_step` on that is skipped; None if there is none."""
        return min((first for first, _ in self.skipped_ranges if first >= data_step), default=None)

    def exclude(self, diverged: Diverged) -> Checkpoint:
        """Skip the data of the failed steps from now on, and return the checkpoint to resume from.

        Every rank calls it. Raises `Diverged` if there is no checkpoint, or after faults.max_rollbacks rollbacks.
        """
        if len(self.skipped_ranges) >= self._max_rollbacks:
            limit = f"faults.max_rollbacks {self._max_rollbacks} allows no further rollback"
            raise Diverged(f"{diverged}; {limit}; {_ADVICE}", diverged.first, diverged.stop)
        origin = on_main(self._topology, lambda: self._find_checkpoint(diverged))
        if origin is None:
            raise Diverged(
                f"{diverged}, and there is no checkpoint before it; {_ADVICE}", diverged.first, diverged.stop
            )
        self.skipped_ranges.append((diverged.first, diverged.stop))
        return origin

    def _find_checkpoint(self, diverged: Diverged) -> Checkpoint | None:
        """Return the newest valid checkpoint, on rank 0, and write skipped_ranges.json.

        A checkpoint whose very next steps failed is taken for part of the failure, if there is an older one.
        """
        origin, _ = checkpoint.newest_valid(self._run_dir)
        older = len(checkpoint.complete_checkpoints(self._run_dir)) > 1
        if origin is not None and older and origin.position.data_step == diverged.first:
            checkpoint.mark_damaged(origin.path)
            origin, _ = checkpoint.newest_valid(self._run_dir)
        if origin is not None:
            write_skipped_ranges(self._run_dir, [*self.skipped_ranges, (diverged.first, diverged.stop)])
        return origin


def _event(name: str, step: StepMetrics, **values: Any) -> dict[str, Any]:
    return {"step": step.step, "split": "event", "event": name, "loss": _json_number(step.loss), **values}


def _json_number(value: float) -> float | str:
    """Return a finite value as it is, others as text: JSON has no NaN."""
    return value if math.isfinite(value) else str(value)
