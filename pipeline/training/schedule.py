"""The learning rate, a pure function of the step, and the length of a run."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from widemix.recipe import Recipe
from widemix.recipe.schedule import ScheduleSection, exact
from widemix.recipe.schema import batch_unit
from widemix.recipe.train import TrainSection


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
