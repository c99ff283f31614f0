"""The operations by compiled code (pipeline/native/batch_last.c), on PyTorch's threads of a CPU, in fp32 and bf16."""

import ctypes
import functools
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from pipeline.native import BuildError
from pipeline.native.library import open_library

_KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_SHARES = 16  # of the work: batch_last.c
_WORTH = 32_768  # numbers from which on more threads than one pay
_SIGNATURES: dict[str, list[Any]] = {
    "norm": 7 * [c_void_p] + 3 * [c_int64] + [c_float],
    "norm_backward": 9 * [c_void_p] + 3 * [c_int64],
    "activate": 3 * [c_void_p] + 2 * [c_int64],
    "activate_backward": 5 * [c_void_p] + 2 * [c_int64],
    "add": 5 * [c_void_p] + 3 * [c_int64],
    "add_backward": 4 * [c_void_p] + 3 * [c_int64],
}


def takes(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the compiled code computes with a tensor like x and others of this type."""
    return x.device.type == "cpu" and x.dtype == dtype and dtype in _KINDS and _library() is not None


def norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, place: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """See `by_torch.norm`."""
    batch, channels = x.shape[1], len(weight)
    tokens = len(x) // channels
    y, (mean, scale) = torch.empty_like(x), x.new_empty(2, tokens, batch, dtype=torch.float32)
    _call("norm", x, x, y, mean, scale, weight.float(), bias.float(), place, tokens, channels, batch, eps)
    return y, mean, scale


def norm_backward(
    g: Tensor, x: Tensor, weight: Tensor, place: Tensor | None, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `by_torch.norm_backward`."""
    batch, channels = x.shape[1], len(weight)
    dx, sums = torch.empty_like(x), _sums(2, _SHARES, channels)
    sizes = (len(x) // channels, channels, batch)
    _call("norm_backward", x, g, x, mean, scale, weight.float(), place, dx, sums[0], sums[1], *sizes)
    dweight, dbias = sums.sum((1, 3)).unbind()
    return dx, dweight, dbias


def activate(x: Tensor, bias: Tensor) -> Tensor:
    """See `by_torch.activate`."""
    y = torch.empty_like(x)
    _call("activate", x, x, y, bias.float(), *x.shape)
    return y


def activate_backward(g: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """See `by_torch.activate_backward`."""
    dx, sums = torch.empty_like(x), _sums(len(x))
    _call("activate_backward", x, g, x, bias.float(), dx, sums, *x.shape)
    return dx, sums.sum(1)


def add(skip: Tensor | None, x: Tensor, bias: Tensor | None, index: Tensor | None) -> Tensor:
    """See `by_torch.add`."""
    out = torch.empty_like(x)
    rows = 1 if bias is None else len(x) // len(bias)
    _call("add", x, skip, x, None if bias is None else bias.float(), index, out, *x.shape, rows)
    return out


def add_backward(g: Tensor, index: Tensor | None, biases: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """See `by_torch.add_backward`."""
    dx, sums = torch.empty_like(g), _sums(_SHARES, biases) if biases else None
    _call("add_backward", g, g, index, dx, sums, *g.shape, len(g) // biases if biases else 1)
    return dx, None if sums is None else sums.sum((0, 2))


def _sums(*shape: int) -> Tensor:
    """Partial sums of gradients, zeros, in as many places as a vector of this machine has."""
    library = _library()
    assert library is not None
    return torch.zeros(*shape, library.batch_last_folded(), dtype=torch.float32, device="cpu")


def _call(name: str, like: Tensor, *arguments) -> None:
    """Call a function for numbers of the type of `like`, with the addresses of tensors; an empty one has none."""
    if like.numel() == 0:
        return
    library = _library()
    assert library is not None
    values = (each.data_ptr() if isinstance(each, Tensor) else each for each in arguments)
    threads = torch.get_num_threads() if like.numel() >= _WORTH else 1
    if getattr(library, f"{name}_{_KINDS[like.dtype]}")(_team(), threads, *values):
        raise IndexError(f"index out of range of {len(like)} rows")


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = open_library()
    except BuildError:  # whoever reads pictures says so
        return None
    for name, types in _SIGNATURES.items():
        for kind in _KINDS.values():
            function = getattr(library, f"{name}_{kind}")
            function.argtypes = [c_void_p, c_int, *types]
    return library


@functools.cache
def _team() -> int | None:
    """The address of the function that starts PyTorch's own threads; None where its OpenMP is not GNU's."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, c_void_p).value
    except AttributeError:
        return None
