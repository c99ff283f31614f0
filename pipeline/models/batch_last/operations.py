"""What lies between the products of a block, with its gradients: LayerNorm, bias and activation, bias and sum.

Shapes: m rows (features), B columns (images), S tokens, C channels. An index is a permutation, int32 [m], or None.
By Triton on GPUs, and PyTorch's operators where it can't; both compute in fp32, fp64 in fp64.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from widemix.models.batch_last import by_torch


def norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, place: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """LayerNorm over the C channels of each token of x [S*C, B], row i of it at row place[i], in `dtype` (x's)."""
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


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, place, dtype):
        """[S*C, B] -> [S*C, B], by LayerNorm."""
        x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
        y, mean, scale = _backend(x, dtype).norm(x, weight, bias, eps, place, dtype)
        ctx.save_for_backward(x, weight, bias, place, mean, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        """The gradients of x, weight and bias: [S*C, B], [C], [C]."""
        x, weight, bias, place, mean, scale = ctx.saved_tensors
        dx, dweight, dbias = _backend(x, g.dtype).norm_backward(g.contiguous(), x, weight, place, mean, scale)
        return dx, dweight.to(weight.dtype), dbias.to(bias.dtype), None, None, None


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        """[D, N] -> [D, N]."""
        x, bias = x.contiguous(), bias.contiguous()
        ctx.save_for_backward(x, bias)
        return _backend(x).activate(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        """The gradients of x and bias: [D, N], [D]."""
        x, bias = ctx.saved_tensors
        dx, dbias = _backend(x, g.dtype).activate_backward(g.contiguous(), x, bias)
        return dx, dbias.to(bias.dtype)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, skip, x, bias, index):
        """[m, B] -> [m, B]."""
        skip, x, bias = (None if each is None else each.contiguous() for each in (skip, x, bias))
        ctx.save_for_backward(index, bias)
        ctx.skips, ctx.dtype = skip is not None, x.dtype
        return _backend(x, x.dtype if skip is None else skip.dtype).add(skip, x, bias, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        """The gradients of skip, x and bias: [m, B], [m, B], [D]."""
        index, bias = ctx.saved_tensors
        g = g.contiguous()
        dx, dbias = _backend(g, ctx.dtype).add_backward(g, index, 0 if bias is None else len(bias), ctx.dtype)
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


def _backend(x: Tensor, other: torch.dtype | None = None) -> ModuleType:
    """What computes with such a tensor, and others of the type `other`."""
    other = other or x.dtype
    by_triton = _by_triton() if x.is_cuda else None
    return by_triton if by_triton and by_triton.takes(x, other) else by_torch


@functools.cache
def _by_triton() -> ModuleType | None:
    """Imported only for tensors on GPUs; None where Triton is missing."""
    try:
        from widemix.models.batch_last import by_triton
    except ImportError:
        return None
    return by_triton
