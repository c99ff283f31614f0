"""The steps between two lines of metrics.jsonl, and the means of their metrics."""

import math
import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from widemix.distributed.topology import mean_over_ranks
from widemix.engine import StepResult
from widemix.run.checkpoint import UnloggedSteps
from widemix.training.faults import StepMetrics


@dataclass
class LogInterval:
    """The steps since the last line of metrics.jsonl. Their metrics stay on the device until `collect` is called.

    `steps` are those of them that did not fail. A run that resumes within an interval starts with those in its
    checkpoint, so that a line is the mean of the same steps whatever happened between them.
    """

    steps: UnloggedSteps = field(default_factory=UnloggedSteps)
    pending: list[tuple[int, int, StepResult, int]] = field(default_factory=list)  # step, data step, result, replaced
    began: float = field(default_factory=lambda: time.perf_counter())
    waited: float = 0.0  # seconds spent waiting for batches
    paused: float = 0.0  # seconds of evaluation and saving, which are not training time
    block_norms: list[float] = field(default_factory=list)  # of the last step's gradient, if the engine was asked

    def __post_init__(self) -> None:
        self._before = len(self.steps.losses)  # steps of an earlier start, which took none of this one's time

    def collect(self) -> list[StepMetrics]:
        """Return the metrics, over all ranks, of the steps since the last call. Every rank calls it."""
        numbers, data_steps, results, replaced = zip(*self.pending, strict=True)
        losses = torch.stack([result.loss for result in results]).double()
        norms = torch.stack([result.grad_norm for result in results]).double()
        counts = torch.tensor(replaced, dtype=torch.float64, device=losses.device)
        *values, counts = mean_over_ranks(torch.stack([losses, norms, counts]))
        columns = (column.tolist() for column in values)
        metrics = [StepMetrics(*row) for row in zip(numbers, data_steps, *columns, strict=True)]
        if (norms := results[-1].block_norms) is not None:
            self.block_norms = norms.tolist()
        self.pending.clear()
        finite = [step for step in metrics if math.isfinite(step.loss)]
        self.steps = UnloggedSteps(
            losses=[*self.steps.losses, *(step.loss for step in finite)],
            grad_norms=[*self.steps.grad_norms, *(s.grad_norm for s in finite if math.isfinite(s.grad_norm))],
            replaced=self.steps.replaced + round(counts.sum().item() * dist.get_world_size()),
        )
        return metrics

    def summary(self, global_batch: int) -> dict[str, float] | None:
        """Return the means over the steps that did not fail; None if all failed."""
        steps = self.steps
        if not steps.losses:
            return None
        seconds = time.perf_counter() - self.began - self.paused
        return {
            "loss": statistics.fmean(steps.losses),
            **({"grad_norm": statistics.fmean(steps.grad_norms)} if steps.grad_norms else {}),
            "images_per_s": (len(steps.losses) - self._before) * global_batch / seconds,
            "data_wait": self.waited / seconds,
            **({"replaced": steps.replaced} if steps.replaced else {}),
        }
