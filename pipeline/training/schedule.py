"""The learning rate, a pure function of the step, and the length of a run."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.recipe.schedule import ScheduleSection
from pipeline.recipe.train import TrainSection


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
    """
    warmup = round(section.warmup_epochs * steps_per_epoch)
    last = epochs * steps_per_epoch - 1
    cooldown = round(section.cooldown_epochs * steps_per_epoch)
    start = last - cooldown if section.name == "constant" else warmup

    def schedule(step: int) -> float:
        if step < warmup:
            return section.warmup_lr + (lr - section.warmup_lr) * step / warmup
        if section.name == "step":
            return lr * section.decay_rate ** math.floor(step / steps_per_epoch / section.decay_epochs)
        if section.name == "constant" and cooldown == 0:
            return lr
        progress = min(max(step - start, 0) / max(last - start, 1), 1.0)
        remaining = (1 + math.cos(math.pi * progress)) / 2 if section.name == "cosine" else 1 - progress
        return section.min_lr + (lr - section.min_lr) * remaining

    return schedule
