"""The learning rate: a pure function of the step."""

import math
from collections.abc import Callable

from pipeline.recipe.schema import ScheduleSection


def build_schedule(section: ScheduleSection, lr: float, steps_per_epoch: int, epochs: int) -> Callable[[int], float]:
    """Linear warm-up from `warmup_lr` to `lr`, then a cosine down to `min_lr` at the last step of the run."""
    warmup = round(section.warmup_epochs * steps_per_epoch)
    total = epochs * steps_per_epoch

    def schedule(step: int) -> float:
        if step < warmup:
            return section.warmup_lr + (lr - section.warmup_lr) * step / warmup
        progress = min((step - warmup) / max(total - 1 - warmup, 1), 1.0)
        return section.min_lr + (lr - section.min_lr) * (1 + math.cos(math.pi * progress)) / 2

    return schedule
