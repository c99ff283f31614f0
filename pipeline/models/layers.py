"""Layers and initial weights that several families share."""

import math
from functools import partial

import torch
from timm.layers import lecun_normal_
from torch import Tensor, nn

from widemix.models.structured import StructuredLinear

# timm's eps and the original code's; Hayase & Karakida write 1e-5 (`norm_eps` of the Mixers).
LayerNorm = partial(nn.LayerNorm, eps=1e-6)


class BlockDiagonal(nn.Module):
    """Multiplies row i by block i: [B, n, I] -> [B, n, O]. With `shared` all blocks are the same: I_n (x) W."""

    def __init__(self, rows: int, inputs: int, outputs: int, shared: bool):
        super().__init__()
        self.shared = shared
        shape = (outputs, inputs) if shared else (rows, outputs, inputs)
        self.weight = nn.Parameter(torch.randn(shape) / math.sqrt(inputs))

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, I] -> [B, n, O]."""
        if self.shared:
            return x @ self.weight.T
        return (x.transpose(0, 1) @ self.weight.transpose(1, 2)).transpose(0, 1)


class GroupedLinear(nn.Module):
    """A linear layer on each of n rows, the same for the rows of a group: [B, n, I] -> [B, n, O].

    Groups are n / G successive rows. The product is that with I_G (x) I_(n/G) (x) W_g, block by block.
    """

    def __init__(self, groups: int, in_features: int, out_features: int):
        super().__init__()
        self.groups, self.in_features, self.out_features = groups, in_features, out_features
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(groups, 1, out_features))

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, I] -> [B, n, O]."""
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor) -> Tensor:
        """`forward` with another bias [G, 1, O]: [B, n, I] -> [B, n, O]."""
        grouped = x.unflatten(1, (self.groups, -1)).transpose(0, 1)  # [G, B, n/G, I]
        y = torch.baddbmm(bias, grouped.flatten(1, 2), self.weight.transpose(1, 2))
        return y.unflatten(1, (len(x), -1)).transpose(0, 1).flatten(1, 2)

    def extra_repr(self) -> str:
        """For print(module)."""
        return f"groups={self.groups}, in_features={self.in_features}, out_features={self.out_features}"


def init_weights(model: nn.Module, head: nn.Module, head_bias: float = 0.0) -> None:
    """Sample linear layers from N(0, 1 / inputs), convolutions from LeCun normal; biases and the head's weight are 0.

    Structured matrices start by a rule of their own: `structured_factors`. `head_bias` is that of every class.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | GroupedLinear):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
        elif isinstance(module, nn.Conv2d):
            lecun_normal_(module.weight)
        elif isinstance(module, StructuredLinear):
            module.reset_parameters()
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(head, nn.Linear):
        nn.init.zeros_(head.weight)
        nn.init.constant_(head.bias, head_bias)
