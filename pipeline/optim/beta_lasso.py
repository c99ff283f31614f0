"""beta-LASSO (Neyshabur 2020): SGD with an l1 penalty that sets small weights to zero."""

from collections.abc import Callable

import torch
from torch import Tensor


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
