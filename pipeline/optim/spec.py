"""What an optimizer is to recipes, engines, checkpoints and estimates."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer: how it is built, and what recipes, engines, checkpoints and estimates need to know of it.

    Checkpoints keep of its state the tensors that have their parameter's shape, a scalar tensor "step", and
    `group_counters`.
    """

    # From the groups of `parameter_groups` and the `OptimSection`. "lr" is overwritten before each step.
    build: "Callable[[Groups, Any], Optimizer]"
    help: str  # printed by `widemix train --help`
    states: int  # fp32 numbers per weight, beside the weight itself: 2 for two moments
    # The section's key with the weight of its penalty, and the name of it in the parameter groups.
    penalty: Literal["weight_decay", "l1"] = "weight_decay"
    # What its step computes from whole parameters. ZeRO 1 to 3 give it slices of many, so it is refused there.
    needs_whole: str | None = None
    # Whether the matrices inside the network get parameter groups of their own, marked "matrices".
    splits_matrices: bool = False
    # Numbers that it keeps in the parameter groups from step to step. Refused under ZeRO 3, which calls it several
    # times a step.
    group_counters: tuple[str, ...] = ()
    # The weights to evaluate with, from the optimizer and a trained weight; None where they are the trained ones.
    evaluation_weight: "Callable[[Optimizer, Tensor], Tensor] | None" = None
    # Raises ValueError where the section has a value that this optimizer can't use.
    check: Callable[[Any], None] | None = None
