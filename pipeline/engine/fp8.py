"""float8 products of the mixings in training, by torchao; with `train.precision: bf16`, on GPUs that have them.

Inputs, weights and gradients are rounded to 8 bits with one scale for each whole tensor, a power of two, so that a
batch that is divided otherwise is rounded in the same way unless its largest number has another exponent. Sums are
fp32, results bf16, weights and their updates fp32. The network is evaluated in bf16.
"""

import logging
import math
from importlib.util import find_spec
from typing import cast

import torch
from torch import nn

from widemix.errors import InputError, install_extra
from widemix.models.pk_layers import Mixing

_SIDE = 16  # what the sides of a matrix must be a multiple of
_CAPABILITY = (8, 9)  # of the first GPUs with such products: Ada, Hopper


def check_fp8(device: torch.device) -> None:
    """`InputError` where torchao is not installed, or the GPU has no such products."""
    if find_spec("torchao") is None:
        raise InputError(f"train.fp8 true: torchao is not installed; {install_extra('fp8')}")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise InputError(
            f"train.fp8 true: {name} has no float8 products, Hopper and newer ones have; set it to false"
        )


def multiply_in_fp8(network: nn.Module, device: torch.device) -> None:
    """Let the linear layers of a network's mixings train with float8 products; `InputError` if there are none.

    On a CPU this is emulated, by bf16 products of rounded numbers: slow, to see what the rounding does to the loss.
    """
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torch's words to torchao
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:  # torchao 0.18 takes names that torch 2.9 has not
        reason = f"does not run with torch {torch.__version__} ({error})"
        raise InputError(f"train.fp8 true: torchao {reason}; take a newer torch, or set it to false") from None

    mixings = (part for part in network.modules() if isinstance(part, Mixing))
    chosen = {id(layer) for mixing in mixings for layer in mixing.children() if _fits(layer)}
    if not chosen:
        raise InputError(f"train.fp8 true: no linear layer of a mixing has sides that are multiples of {_SIDE}")
    config = Float8LinearConfig(emulate=device.type == "cpu", round_scales_to_power_of_2=True)
    convert_to_float8_training(network, module_filter_fn=lambda layer, _: id(layer) in chosen, config=config)
    for layer in network.modules():
        if type(layer).__module__.startswith("torchao."):
            layer.__class__ = type("Float8Linear", (_AnyBatch, type(layer)), {})
            layer.train(network.training)


def _fits(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and layer.in_features % _SIDE == layer.out_features % _SIDE == 0


class _AnyBatch(nn.Module):
    """A linear layer of torchao for any number of rows, which is torch's own where the network does not train."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., I] -> [..., O]."""
        if not self.training:
            layer = cast(nn.Linear, self)
            return nn.functional.linear(x, layer.weight, layer.bias)
        rows = math.prod(x.shape[:-1])  # a side of a matrix in the gradient of the weight
        if rows % _SIDE == 0:
            return super().forward(x)
        padded = nn.functional.pad(x.flatten(0, -2), (0, 0, 0, -rows % _SIDE))
        return super().forward(padded)[:rows].view(*x.shape[:-1], -1)
