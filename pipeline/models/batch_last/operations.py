"""The products of a block and what lies between, with gradients: LayerNorm, bias and activation, bias and sum.

Shapes: m rows (features), B columns (images), S tokens, C channels. An index is a permutation, int32 [m], or None.
By Triton on GPUs, and PyTorch's operators where it can't; both compute in fp32, fp64 in fp64.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from widemix.models.batch_last import by_torch

ALIGNED = 8  # numbers of 2 bytes, at multiples of which rows must begin for the fast products of GPUs


def product(weight: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """W [D, d] times x [d, N], in `dtype`."""
    if x.is_cuda and dtype.itemsize == 2 and weight.shape[1] % ALIGNED:
        return product_by_aligned_copies(weight.to(dtype), x.to(dtype))
    return weight @ x


def product_by_aligned_copies(weight: Tensor, x: Tensor) -> Tensor:
    """W x, by copies whose rows begin at multiples of `ALIGNED` numbers."""
    return _Product.apply(weight, x)


def norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, place: Tensor | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """LayerNorm over the C channels of each token of x [S*C, B], row i of it at row place[i], in `dtype` (x's).

    Returns x too, for what else is computed from it: its gradient is added in the pass that computes the norm's.
    """
    return _Norm.apply(x, weight, bias, eps, place, dtype or x.dtype)


def activate(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias) of x [D, N] with a bias for each row."""
    return _Activate.apply(x, bias)


def add(skip: Tensor | None, x: Tensor, bias: Tensor | None = None, index: Tensor | None = None) -> Tensor:
    """skip + (x + bias)[index] of rows [m, B]. `bias` [D] has one number for m / D rows one after the other."""
    return _Add.apply(skip, x, bias, index)


def images_of(x: Tensor, channels: int) -> Tensor:
    """x [S*C, B] as [B, S, C] in the same memory; for autograd no view of it, since FSDP2 warns of such outputs."""
    return _ImagesOf.apply(x, channels)


class _Product(torch.autograd.Function):
    """By a copy of W column by column, and its gradient alike: no product then has a matrix with unaligned rows."""

    @staticmethod
    def forward(ctx, weight, x):
        """[D, d], [d, N] -> [D, N]."""
        columns = aligned(weight.t())
        columns.copy_(weight.t())
        ctx.save_for_backward(columns, x)
        return columns.t() @ x

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        """The gradients of W and x: [D, d], [d, N]."""
        columns, x = ctx.saved_tensors
        by_columns = aligned(columns)
        torch.mm(x, g.t(), out=by_columns)
        return by_columns.t(), columns @ g


def aligned(like: Tensor) -> Tensor:
    """An empty matrix of this shape, in which rows begin at multiples of `ALIGNED`."""
    rows, columns = like.shape
    return like.new_empty(rows, -(-columns // ALIGNED) * ALIGNED)[:, :columns]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, place, dtype):
        """[S*C, B] -> [S*C, B], by LayerNorm, and the input."""
        ctx.set_materialize_grads(False)
        rows, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
        y, mean, scale = backend_of(rows, dtype).norm(rows, weight, bias, eps, place, dtype)
        ctx.save_for_backward(rows, weight, bias, place, mean, scale)
        return y, x

    @staticmethod
    @once_differentiable
    def backward(ctx, g, more):
        """The gradients of x, weight and bias: [S*C, B], [C], [C]."""
        x, weight, bias, place, mean, scale = ctx.saved_tensors
        if g is None:  # only x was used
            return more, None, None, None, None, None
        more = None if more is None else more.contiguous()
        backend = backend_of(x, g.dtype)
        dx, dweight, dbias = backend.norm_backward(g.contiguous(), x, weight, place, mean, scale, more)
        return dx, dweight.to(weight.dtype), dbias.to(bias.dtype), None, None, None


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        """[D, N] -> [D, N]."""
        x, bias = x.contiguous(), bias.contiguous()
        ctx.save_for_backward(x, bias)
        return backend_of(x).activate(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        """The gradients of x and bias: [D, N], [D]."""
        x, bias = ctx.saved_tensors
        dx, dbias = backend_of(x, g.dtype).activate_backward(g.contiguous(), x, bias)
        return dx, dbias.to(bias.dtype)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, skip, x, bias, index):
        """[m, B] -> [m, B]."""
        skip, x, bias = (None if each is None else each.contiguous() for each in (skip, x, bias))
        ctx.save_for_backward(index, bias)
        ctx.skips, ctx.dtype = skip is not None, x.dtype
        return backend_of(x, x.dtype if skip is None else skip.dtype).add(skip, x, bias, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        """The gradients of skip, x and bias: [m, B], [m, B], [D]."""
        index, bias = ctx.saved_tensors
        g = g.contiguous()
        dx, dbias = backend_of(g, ctx.dtype).add_backward(g, index, 0 if bias is None else len(bias), ctx.dtype)
        return g if ctx.skips else None, dx, None if bias is None else dbias.to(bias.dtype), None


class _ImagesOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, channels):
        """[S*C, B] -> [B, S, C]."""
        ctx.size = x.shape
        view = x.view(len(x) // channels, channels, x.shape[1]).permute(2, 0, 1)
        return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), view.shape, view.stride())

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        """The gradient of x: [S*C, B]."""
        return g.permute(1, 2, 0).reshape(ctx.size), None


def backend_of(x: Tensor, other: torch.dtype | None = None) -> ModuleType:
    """Return the module that computes with such a tensor, and others of the type `other`."""
    backend = BACKENDS[x.device.type]() if x.device.type in BACKENDS else None
    return backend if backend and backend.takes(x, other or x.dtype) else by_torch


@functools.cache
def _by_triton() -> ModuleType | None:
    """Imported only for tensors on GPUs; None where Triton is missing."""
    try:
        from widemix.models.batch_last import by_triton
    except ImportError:
        return None
    return by_triton


BACKENDS: dict[str, Callable[[], Any]] = {"cuda": _by_triton}  # by the kind of device, where not PyTorch computes
