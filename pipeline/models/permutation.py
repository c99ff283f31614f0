"""Permutations of the m = S*C entries of a feature matrix, as index vectors.

A permutation J is an int32 vector with (J x)[i] = x[index[i]]. Entries are flattened row by row: [S, C] becomes
[S*C] with the channels of a token next to each other. (The papers' vec stacks columns; the two differ by J_c.)
"""

import inspect
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from widemix.models.reorder import reorder_columns


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


def compose(second: Tensor, first: Tensor) -> Tensor:
    """The product `second @ first`: applies `first`, then `second`."""
    return first[second]


class _Reorder(torch.autograd.Function):
    """x[:, index], or with `back` x[:, inverse(index)]: each is the gradient of the other.

    PyTorch's own gradient of an index adds into zeros atomically.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor, back: bool) -> Tensor:
        """[B, m] -> [B, m]."""
        return reorder_columns(x, index, back)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        """Keep the index for the gradient."""
        _, index, ctx.back = inputs
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx, gradient):
        """The gradient, in the order of the input: [B, m]."""
        (index,) = ctx.saved_tensors
        reorder = _Reorder.apply if torch.is_grad_enabled() else reorder_columns  # for a gradient of this gradient
        return reorder(gradient, index, not ctx.back), None, None


# PyTorch asks for the signature at every call, and would make it anew.
_Reorder.forward.__signature__ = inspect.signature(_Reorder.forward)  # type: ignore[attr-defined]


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
        if torch.jit.is_scripting():  # it does not support autograd.Function
            moved = flat.index_select(1, self.index)
        else:
            moved = _Reorder.apply(flat, self.index, False)
        return moved.unflatten(1, (-1, self.columns))

    def extra_repr(self) -> str:
        """For print(module)."""
        return f"{len(self.index)}, columns={self.columns}"


class Transpose(nn.Module):
    """J_c x, reshaped into rows: [B, n, d] -> [B, d, n], as a view."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, d] -> [B, d, n]."""
        return x.transpose(1, 2)
