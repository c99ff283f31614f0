"""Optimizers of our own: SGD by torch's fused kernel, beta-LASSO (Neyshabur 2020), and Muon with AdamW."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.sgd import sgd
from typing_extensions import override

from widemix.optim.dtensor import is_dtensor, local_part


class FusedSgd(SGD):
    """torch's `SGD(fused=True)`, also of FSDP's DTensors, for which torch (2.15) has no fused SGD.

    The kernel runs on their local tensors, and skips the step on the device where the gradient is not finite.
    Momentum starts at zero: torch's own is left uninitialised where the first step is skipped.
    """

    @override
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            momenta: list[Tensor | None] = [None] * len(weights)
            if group["momentum"]:
                for weight in weights:
                    if "momentum_buffer" not in self.state[weight]:
                        self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
                momenta = [local_part(self.state[weight]["momentum_buffer"]) for weight in weights]
            keys = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
            sgd(
                [local_part(weight) for weight in weights],
                [local_part(weight.grad) for weight in weights],
                momenta,
                fused=True,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                **{key: group[key] for key in keys},
            )


class BetaLasso(torch.optim.Optimizer):
    """SGD on loss + l1 * |w|_1, and after each step every weight under beta * l1 becomes zero (algorithm 1).

        w <- w - lr (gradient + l1 sign(w));  w <- w where |w| >= beta * l1, else 0

    A weight at zero comes back when one step carries it over the threshold. `l1` may differ by parameter group: 0
    for biases and norms, which makes them plain SGD. Momentum is heavy-ball, on gradient and sign together.
    """

    def __init__(self, params, lr: float, l1: float, beta: float, momentum: float = 0.0):
        super().__init__(params, {"lr": lr, "l1": l1, "beta": beta, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on the gradients that are there."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)
        return loss

    def _update(self, weight: Tensor, gradient: Tensor, group: dict) -> None:
        direction = gradient.add(weight.sign(), alpha=group["l1"]) if group["l1"] else gradient
        if group["momentum"]:
            state = self.state[weight]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            direction = state["momentum_buffer"].mul_(group["momentum"]).add_(direction)
        weight.add_(direction, alpha=-group["lr"])
        weight.masked_fill_(weight.abs() < group["beta"] * group["l1"], 0)


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: five steps bring singular values to 0.7 ... 1.2
_STEPS = 5


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, its updates scaled to the size of AdamW's (Liu et al. 2025, eq. 4).

    Equal to torch.optim.Muon(adjust_lr_fn="match_rms_adamw") bit for bit on whole matrices. On those that FSDP2 has
    sharded, torch's computes every product of the iteration on shards, with 13 collectives a matrix and partial sums
    rounded to bf16; this one gathers the update once, and each rank keeps its rows of the result.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.1, "momentum": momentum})

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on the gradients that are there."""
        assert closure is None
        for group in self.param_groups:
            momentum, lr = group["momentum"], float(group["lr"])
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix.grad)
                average = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
                update = _orthogonal(matrix.grad.lerp(average, momentum).bfloat16())
                matrix.mul_(1 - lr * group["weight_decay"])
                matrix.add_(update, alpha=-lr * 0.2 * math.sqrt(max(matrix.shape)))
        return None


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly, in the layout of `matrix`: Newton-Schulz's iteration."""
    if is_dtensor(matrix):
        whole = _orthogonal(matrix.full_tensor())
        everywhere = type(matrix).from_local(whole, matrix.device_mesh, run_check=False)  # replicated: the default
        return everywhere.redistribute(placements=matrix.placements)  # without communication
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the groups marked "matrices", torch's AdamW for the others, as one optimizer.

    One learning rate and decay serve both.

    Args:
        groups: parameter groups, each with "params", "weight_decay" and a bool "matrices".
        adam: keyword arguments of AdamW, "lr" and "fused" among them.
        momentum: Muon's Nesterov momentum.
    """

    def __init__(self, groups: list[dict[str, Any]], adam: dict[str, Any], momentum: float):
        super().__init__(groups, {"fused": adam["fused"]})
        self._optimizers: list[torch.optim.Optimizer] = []
        matrices = [group for group in self.param_groups if group["matrices"]]
        others = [group for group in self.param_groups if not group["matrices"]]
        if matrices:
            self._optimizers.append(Muon(matrices, adam["lr"], momentum))
        if others:
            self._optimizers.append(torch.optim.AdamW(others, **adam))
        for optimizer in self._optimizers:
            optimizer.state = self.state

    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on the gradients that are there."""
        assert closure is None
        for optimizer in self._optimizers:
            optimizer.step()
        return None
