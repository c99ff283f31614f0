"""The recipe's section `schedule`: the learning rate by step."""

from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from widemix.section import Epochs, Section, key

Rate = Annotated[float, Field(ge=0, le=1000)]


class ScheduleSection(Section):
    """Learning rate by step: a linear warm-up, then one of four schedules."""

    name: Literal["cosine", "linear", "step", "constant"] = key(
        "cosine",
        "cosine or linear down to min_lr; step: by decay_rate every decay_epochs; constant, then a cool-down",
    )
    warmup_epochs: Epochs = key(0.0, "length of the warm-up, epochs")
    warmup_lr: Rate = key(1e-6, "learning rate at the first step of the warm-up")
    min_lr: Rate = key(0.0, "learning rate at the last step (cosine, linear, cool-down)")
    decay_epochs: Annotated[float, Field(ge=1e-6, le=1_000_000)] = key(
        30.0, "step: epochs between decays, warm-up included"
    )
    decay_rate: Annotated[float, Field(gt=0, le=1)] = key(0.1, "step: factor of each decay")
    cooldown_epochs: Epochs = key(0.0, "constant: epochs of the linear cool-down at the end")


def exact(number: float) -> Fraction:
    """Return the decimal number that a recipe has, of which the float is the nearest: 0.1 is a tenth."""
    return Fraction(str(number))
