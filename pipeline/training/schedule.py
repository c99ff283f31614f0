"""The schedule of a run: its length, the learning rate of each step, when it logs, evaluates and saves."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import torch
import torch.distributed as dist

from widemix.distributed.requests import Request
from widemix.distributed.topology import mean_over_ranks
from widemix.engine import StepResult
from widemix.recipe import Recipe
from widemix.recipe.rules import batch_unit
from widemix.recipe.sections import EvalSection, ScheduleSection, TrainSection, exact
from widemix.run.checkpoint import UnloggedSteps
from widemix.training.faults import StepMetrics


@dataclass(frozen=True)
class Schedule:
    """How many steps a run has, and the learning rate of each."""

    steps_per_epoch: int
    last_step: int
    lr: Callable[[int], float]  # of a step, counted from 0


def build_run_schedule(section: ScheduleSection, lr: float, train: TrainSection, steps_per_epoch: int) -> Schedule:
    """Return the schedule of a run of `train.epochs` epochs, which ends after `train.max_steps` if that is fewer."""
    last_step = train.epochs * steps_per_epoch
    if train.max_steps is not None:
        last_step = min(last_step, train.max_steps)
    return Schedule(steps_per_epoch, last_step, build_schedule(section, lr, steps_per_epoch, train.epochs))


def build_schedule(section: ScheduleSection, lr: float, steps_per_epoch: int, epochs: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, counted from 0.

    Linear warm-up from `warmup_lr` to `lr`, then the decay that `section.name` names, to `min_lr` at the last step.
    Computed with the decimal numbers of the recipe and rounded once, so that no rate changes a step early or late.
    """
    warmup = round(exact(section.warmup_epochs) * steps_per_epoch)
    last = epochs * steps_per_epoch - 1
    cooldown = round(exact(section.cooldown_epochs) * steps_per_epoch)
    start = last - cooldown if section.name == "constant" else warmup
    peak, lowest, first = exact(lr), exact(section.min_lr), exact(section.warmup_lr)
    steps_per_decay = exact(section.decay_epochs) * steps_per_epoch

    def schedule(step: int) -> float:
        if step < warmup:
            return float(first + (peak - first) * step / warmup)
        if section.name == "step":
            return lr * section.decay_rate ** (step // steps_per_decay)
        if section.name == "constant" and cooldown == 0:
            return lr
        progress = min(Fraction(max(step - start, 0), max(last - start, 1)), Fraction(1))
        cosine = section.name == "cosine"
        remaining = Fraction((1 + math.cos(math.pi * progress)) / 2) if cosine else 1 - progress
        return float(lowest + (peak - lowest) * remaining)

    return schedule


FEW_STEPS, ENOUGH_STEPS = 10, 20  # of an epoch


def suggest_batch(recipe: Recipe, samples: int, ranks: int) -> str | None:
    """Return a smaller batch and its rate where an epoch has few steps; None where it has enough, or none is smaller.

    The rate goes with the batch for SGD (Goyal et al. 2017), and with its square root for Adam's kin, which divide by
    the gradient's size (Malladi et al. 2022).
    """
    batch, unit = recipe.train.global_batch, batch_unit(recipe, ranks)
    smaller = max(unit, samples // ENOUGH_STEPS // unit * unit)
    if samples // batch >= FEW_STEPS or 2 * smaller > batch:
        return None
    steps = f"{samples // batch} steps" if samples >= 2 * batch else "one step"
    linear = recipe.optim.name == "sgd"
    lr = recipe.optim.lr * (smaller / batch) ** (1 if linear else 0.5)
    rule = "in proportion to the batch, as for SGD" if linear else "by the square root of the batch, as for Adam"
    return (
        f"{samples} samples are {steps} an epoch of {batch}; --train.global_batch {smaller} "
        f"--optim.lr {lr:.1e} makes {samples // smaller} (the rate {rule})"
    )


class Cadence:
    """The keys of a recipe that say when to save and evaluate. All ranks ask it the same; see `SharedRequests`."""

    def __init__(self, train: TrainSection, evaluation: EvalSection):
        self._train, self._eval = train, evaluation
        self._timers = {
            request: Timer(minutes)
            for request, minutes in ((Request.SAVE, train.save_minutes), (Request.EVALUATE, evaluation.every_minutes))
            if minutes is not None
        }

    def requests(self) -> Request:
        """Return what this rank's clock asks for: to evaluate once, until it is `evaluated`. Only rank 0's counts."""
        due = Request.NONE
        for request, timer in self._timers.items():
            if timer.expired():
                due |= request
                if request == Request.SAVE:
                    timer.restart()
        return due

    def evaluated(self) -> None:
        """Count the minutes between evaluations from now."""
        if timer := self._timers.get(Request.EVALUATE):
            timer.restart()

    def saves(self, step: int, ends_epoch: bool, requests: Request) -> bool:
        """Whether to save after this step, counted from 1."""
        steps = self._train.save_every_steps
        if steps is None and self._train.save_minutes is None:
            return ends_epoch
        return Request.SAVE in requests or (steps is not None and step % steps == 0)

    def evaluates(self, epoch: int, requests: Request) -> bool:
        """Whether to evaluate at the end of this epoch, counted from 0."""
        in_time = self._eval.every_minutes is None or Request.EVALUATE in requests
        return in_time and (epoch + 1) % self._eval.every_epochs == 0


def rarely_kept(train: TrainSection, steps_per_epoch: int) -> str | None:
    """A warning where a run does not save at all steps that `train.keep_every_steps` divides; None elsewhere."""
    every, saved = train.keep_every_steps, train.save_every_steps or steps_per_epoch
    if every is None or every % saved == 0:
        return None
    kept = math.lcm(every, saved)
    return f"train.keep_every_steps {every}: a run that saves every {saved} steps keeps those of every {kept}"


class Timer:
    """Expires once, so many minutes after its start or `restart`."""

    def __init__(self, minutes: float):
        self._seconds = 60 * minutes
        self.restart()

    def restart(self) -> None:
        """Count the minutes from now."""
        self._due = time.monotonic() + self._seconds

    def expired(self) -> bool:
        """Return whether the minutes have passed, for the first time."""
        expired = time.monotonic() >= self._due
        if expired:
            self._due = math.inf
        return expired


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
