"""Schedule-free AdamW: the library's optimizer, and the average that it evaluates with (Defazio et al. 2024)."""

from typing import Any

import torch
from schedulefree import AdamWScheduleFree


def build(groups: list[dict[str, Any]], adam: dict[str, Any]) -> torch.optim.Optimizer:
    """The optimizer, left in its mode of training: the parameters hold y, and `average` computes x."""
    optimizer = AdamWScheduleFree(groups, **adam)
    optimizer.train()
    return optimizer


def average(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> torch.Tensor:
    """x, to evaluate with, from the trained `weight` y = (1 - beta1) z + beta1 x (equation 4); a new tensor."""
    z = optimizer.state.get(weight, {}).get("z")
    return weight.clone() if z is None else weight.lerp(z, 1 - 1 / optimizer.defaults["betas"][0])
