"""SGD by torch's fused kernel, sharded weights included."""

import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.sgd import sgd
from typing_extensions import override

from widemix.optim.dtensor import local_part


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
