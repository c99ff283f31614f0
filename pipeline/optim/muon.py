"""Muon for the matrices inside a network, AdamW for its other parameters."""

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from pipeline.errors import InputError


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for the groups marked "matrices", torch's AdamW for the others, as one optimizer.

    Muon's updates are scaled to the size of AdamW's (Liu et al. 2025), so one learning rate and decay serve both.

    Args:
        groups: parameter groups, each with "params", "weight_decay" and a bool "matrices".
        adam: keyword arguments of AdamW, "lr" and "fused" among them.
        momentum: Muon's Nesterov momentum.
    """

    def __init__(self, groups: list[dict[str, Any]], adam: dict[str, Any], momentum: float):
        if not hasattr(torch.optim, "Muon"):
            raise InputError(f"optim.name muon: torch {torch.__version__} does not have it; take a newer one")
        super().__init__(groups, {"fused": adam["fused"]})
        self._optimizers: list[torch.optim.Optimizer] = []
        matrices = [group for group in self.param_groups if group["matrices"]]
        others = [group for group in self.param_groups if not group["matrices"]]
        if matrices:
            muon = torch.optim.Muon(matrices, lr=adam["lr"], momentum=momentum, adjust_lr_fn="match_rms_adamw")
            self._optimizers.append(muon)
        if others:
            self._optimizers.append(torch.optim.AdamW(others, **adam))
        self.param_groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for optimizer in self._optimizers:
            optimizer.state = self.state

    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None
        for optimizer in self._optimizers:
            optimizer.step()
        return None
