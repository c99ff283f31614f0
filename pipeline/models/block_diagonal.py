"""Block-diagonal matrices."""

import math

import torch
from torch import Tensor, nn


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
