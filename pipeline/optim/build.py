"""Build the optimizer, set its learning rate, and read and write the numbers that it keeps in its groups."""

from collections.abc import Iterable

import torch
from torch import nn

from widemix.optim.groups import parameter_groups
from widemix.optim.section import OptimSection


def build_optimizer(section: OptimSection, module: nn.Module) -> torch.optim.Optimizer:
    """The section's optimizer over the parameters that need a gradient, in the groups of `parameter_groups`."""
    return section.spec.build(parameter_groups(section, module), section)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step, times each group's "lr_scale"."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def group_scalars(optimizer: torch.optim.Optimizer, counters: Iterable[str]) -> dict[str, float]:
    """The `counters` that the optimizer has in its groups by now: "group<number>/<counter>" -> value."""
    return {
        f"group{number}/{name}": float(group[name])
        for number, group in enumerate(optimizer.param_groups)
        for name in counters
        if name in group
    }


def set_group_scalars(optimizer: torch.optim.Optimizer, counters: Iterable[str], scalars: dict[str, float]) -> None:
    """The reverse of `group_scalars`: an int or float stays one; others, and those not there yet, become tensors."""
    for number, group in enumerate(optimizer.param_groups):
        for name in counters:
            value = scalars.get(f"group{number}/{name}")
            if value is not None:
                kind = type(group.get(name))
                group[name] = kind(value) if kind in (int, float) else torch.tensor(value, dtype=torch.float32)
