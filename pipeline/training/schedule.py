"""The learning rate: a pure function of the step."""

import math
from collections.abc import Callable

from pipeline.recipe.schedule import ScheduleSection


def build_schedule(section: ScheduleSection, lr: float, steps_per_epoch: int, epochs: int) -> Callable[[int], float]:
    """Linear warm-up from `warmup_lr` to `lr`, then the section's way down, to `min_lr` at the run's last step."""
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
        left = (1 + math.cos(math.pi * progress)) / 2 if section.name == "cosine" else 1 - progress
        return section.min_lr + (lr - section.min_lr) * left

    return schedule
