"""A block-diagonal matrix."""

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
