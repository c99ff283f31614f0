"""Permutations of the m = S*C entries of a feature matrix, as index vectors.

A permutation J is an int32 vector with (J x)[i] = x[index[i]]. Entries are flattened row by row: [S, C] becomes
[S*C] with the channels of a token next to each other. (The papers' vec stacks columns; the two differ by J_c.)
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn


def identity(size: int) -> Tensor:
    """J x = x."""
    return torch.arange(size, dtype=torch.int32)


def commutation(rows: int, columns: int) -> Tensor:
    """J_c: takes the flattened [rows, columns] matrix to its flattened transpose."""
    return identity(rows * columns).view(rows, columns).t().flatten()


def random(size: int, key: int | Sequence[int]) -> Tensor:
    """A uniform random permutation; the non-negative integers in `key` determine it."""
    order = np.random.default_rng(key).permutation(size)
    return torch.from_numpy(order.astype(np.int32))


def inverse(index: Tensor) -> Tensor:
    """J^T, which is J^-1."""
    result = torch.empty_like(index)
    result[index] = torch.arange(len(index), dtype=index.dtype, device=index.device)
    return result


def compose(second: Tensor, first: Tensor) -> Tensor:
    """The product `second @ first`: applies `first`, then `second`."""
    return first[second]


class _Reorder(torch.autograd.Function):
    """x[:, index]. Its gradient gathers by the inverse, where PyTorch's own adds into zeros atomically."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(1, index)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, gradient):
        (index,) = ctx.saved_tensors
        return _Reorder.apply(gradient.contiguous(), inverse(index)), None


class Permute(nn.Module):
    """J x for any J, reshaped into rows: [B, n, d] of m = n*d entries -> [B, m / columns, columns]."""

    def __init__(self, index: Tensor, columns: int):
        super().__init__()
        self.columns = columns
        self.index: Tensor
        self.register_buffer("index", index)

    def check_indices(self) -> None:
        """Raise ValueError unless `index`, which may have been loaded, is a permutation."""
        if not torch.equal(self.index.sort().values.cpu(), identity(len(self.index))):
            raise ValueError("index is not a permutation")

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, d] -> [B, m / columns, columns]."""
        flat = x.flatten(1)  # [B, m]
        # TorchScript does not support autograd.Function.
        moved = flat.index_select(1, self.index) if torch.jit.is_scripting() else _Reorder.apply(flat, self.index)
        return moved.unflatten(1, (-1, self.columns))

    def extra_repr(self) -> str:
        """For print(module)."""
        return f"{len(self.index)}, columns={self.columns}"


class Transpose(nn.Module):
    """J_c x, reshaped into rows: [B, n, d] -> [B, d, n], as a view."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, d] -> [B, d, n]."""
        return x.transpose(1, 2)
