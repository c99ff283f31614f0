"""A block by compiled code (pipeline/native/mixer_block.c), on PyTorch's threads of a CPU, from fp32 or bf16.

It computes in fp32, some images at a time in the lanes of vectors, so that any permutation moves whole vectors. The
features of these images stay in the processor's second-level cache through the whole block.
"""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from widemix.models.batch_last.layers import (
    Block,
    index_of,
    layers_of,
    same_versions,
    sound_index,
    versions_of,
    weight_of,
)
from widemix.models.drop_path import DropPath
from widemix.models.permutation import Permute
from widemix.models.pk_layers import Mixing, Square
from widemix.native import BuildError
from widemix.native.library import open_library

_DTYPES = (torch.float32, torch.bfloat16)
_WORTH = 32_768  # numbers from which on more threads than one pay
_ERRORS = {1: IndexError("index out of range"), 2: MemoryError("no memory to compute a block")}
_PARAMETERS = 9  # of a mixing, as mixing.h counts them


class _Shape(ctypes.Structure):
    """`mixing_shape` of mixing.h."""

    _fields_ = (
        *((name, c_int32) for name in ("rows", "inputs", "hidden", "outputs", "channels", "activation")),
        *((name, c_float) for name in ("eps", "skip_eps")),
        *((name, c_void_p) for name in ("inward", "middle", "outward", "skip")),
    )


@dataclass(frozen=True)
class _Plan:
    """Everything that the compiled code has to know of a block besides its parameters, and its origin."""

    shapes: Any  # of both mixings, one after the other
    kept: list[Tensor | None]  # the indices whose addresses are in there
    of: list[tuple[Tensor, int]]
    sizes: list[torch.Size | None]  # of the parameters
    settings: list[Any]  # kinds of permutations and activations, and epsilons


_plans: WeakKeyDictionary[Block, _Plan] = WeakKeyDictionary()


def takes(block: Block, x: Tensor) -> bool:
    """Whether the compiled code computes this block, one of those that fit, of such features."""
    known = x.device.type == "cpu" and x.dtype in _DTYPES and None not in map(_activation, _mixings(block))
    return known and load_library() is not None


def forward(block: Block, x: Tensor) -> Tensor:
    """[B, S0, C] -> [B, S, C]. Raises ValueError for an index that is no permutation."""
    scales = [part.scale(x) if isinstance(part, DropPath) else None for part in (block.drop_path1, block.drop_path2)]
    parameters = _parameters(block)
    return _Block.apply(x, _plan_of(block, parameters), torch.is_grad_enabled(), *scales, *parameters)


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, plan, keeps, scale1, scale2, *parameters):
        """[B, S0, C] -> [B, S, C]."""
        x, (_, last) = x.contiguous(), plan.shapes
        kept = torch.empty(_kept_bytes(plan, parameters, len(x)) if keeps else 0, dtype=torch.uint8, device="cpu")
        y = x.new_empty(len(x), last.rows * last.outputs // last.channels, last.channels)
        _call(plan, parameters, (scale1, scale2), x, y, kept if keeps else None, None)
        ctx.plan, ctx.shape = plan, x.shape
        ctx.save_for_backward(kept, scale1, scale2, *parameters)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        """The gradients of x [B, S0, C] and the parameters."""
        kept, scale1, scale2, *parameters = ctx.saved_tensors
        dx = g.new_empty(ctx.shape)
        gradients = [
            None if each is None else torch.empty(each.shape, dtype=torch.float32, device="cpu")
            for each in parameters
        ]
        _call(ctx.plan, parameters, (scale1, scale2), g.contiguous(), dx, kept, gradients)
        pairs = zip(gradients, parameters, strict=True)
        return dx, *4 * [None], *(None if grad is None else grad.to(each.dtype) for grad, each in pairs)


def _mixings(block: Block) -> tuple[Mixing, Mixing]:
    return block.mlp_tokens, block.mlp_channels


def _activation(mixing: Mixing) -> int | None:
    """Its number in lanes.h; None for another one."""
    if isinstance(mixing.act, nn.GELU):
        return {"none": 0, "tanh": 1}.get(mixing.act.approximate)
    return 2 if isinstance(mixing.act, Square) else None


def _parameters(block: Block) -> list[Tensor | None]:
    """Of both mixings, None where one is missing."""
    found: list[Tensor | None] = []
    parts = ((block.norm1, block.skip), (block.norm2, block.channel_skip))
    for mixing, (norm, skip) in zip(_mixings(block), parts, strict=True):
        first, last = layers_of(mixing)
        second = None if first is last else last
        skip_norm = getattr(skip, "norm", None)
        for part in (norm, first, second):
            found += [None, None] if part is None else [weight_of(part), getattr(part, "bias", None)]
        found += [getattr(getattr(skip, "fc", None), "weight", None)]
        found += [getattr(skip_norm, "weight", None), getattr(skip_norm, "bias", None)]
    return found


def _plan_of(block: Block, parameters: Sequence[Tensor | None]) -> _Plan:
    """It is kept until the permutations or sizes are others."""
    first, second = (
        (each.permute_in, getattr(each, "permute_hidden", None), each.permute_out) for each in _mixings(block)
    )
    modules = (*first, *second, block.skip, block.channel_skip)
    norms = (block.norm1, block.norm2, getattr(block.skip, "norm", None))
    of, sizes = versions_of(*modules), [None if each is None else each.shape for each in parameters]
    settings = [
        *map(type, modules),
        *map(_activation, _mixings(block)),
        *(getattr(each, "eps", None) for each in norms),
    ]
    plan = _plans.get(block)
    if plan is None or (plan.sizes, plan.settings) != (sizes, settings) or not same_versions(plan.of, of):
        with torch.inference_mode(False):  # training may follow
            plan = _plans[block] = _compute_plan(block, of, sizes, settings)
    return plan


def _compute_plan(
    block: Block, of: list[tuple[Tensor, int]], sizes: list[torch.Size | None], settings: list[Any]
) -> _Plan:
    shapes, kept = (_Shape * 2)(), []
    channels = layers_of(block.mlp_channels)[0].in_features
    tokens = layers_of(block.mlp_tokens)[1].out_features
    parts = ((block.norm1, block.skip, channels), (block.norm2, block.channel_skip, tokens))
    for shape, mixing, (norm, skip, rows) in zip(shapes, _mixings(block), parts, strict=True):
        first, last = layers_of(mixing)
        hidden = 0 if first is last else first.out_features
        middle = getattr(mixing, "permute_hidden", None)
        inward = index_of(mixing.permute_in, rows * first.in_features // channels, channels)
        indices = [
            inward,
            index_of(middle, rows, hidden) if isinstance(middle, Permute) else None,
            index_of(mixing.permute_out, rows, last.out_features),
            sound_index(skip) if isinstance(skip, Permute) else None,
        ]
        lengths = (rows * first.in_features, rows * hidden, rows * last.out_features, rows * first.in_features)
        if any(each is not None and len(each) != length for each, length in zip(indices, lengths, strict=True)):
            raise ValueError("a permutation of another size than the block's features")
        numbers = (rows, first.in_features, hidden, last.out_features, channels, _activation(mixing))
        eps = [getattr(each, "eps", 0.0) for each in (norm, getattr(skip, "norm", None))]
        for field, value in zip(_Shape._fields_, [*numbers, *eps, *map(_address, indices)], strict=True):
            setattr(shape, field[0], value)
        kept += indices
    return _Plan(shapes, kept, of, sizes, settings)


def _kept_bytes(plan: _Plan, parameters: Sequence[Tensor | None], batch: int) -> int:
    library = load_library()
    assert library is not None
    return library.mixer_block_kept(plan.shapes, _addresses(parameters), batch)


def _call(
    plan: _Plan,
    parameters: Sequence[Tensor | None],
    scales: Sequence[Tensor | None],
    source: Tensor,
    target: Tensor,
    kept: Tensor | None,
    gradients: Sequence[Tensor | None] | None,
) -> None:
    """The block's output, or with `gradients` its gradients, from the tensor `source` to others."""
    library = load_library()
    assert library is not None
    numbers = [None if each is None else each.detach().float().contiguous() for each in (*parameters, *scales)]
    threads = torch.get_num_threads() if source.numel() >= _WORTH else 1
    failed = library.mixer_block(
        _team() if threads > 1 else None,
        threads,
        plan.shapes,
        _addresses(numbers[: len(parameters)]),
        _addresses(numbers[len(parameters) :]),
        source.data_ptr(),
        target.data_ptr(),
        _address(kept),
        None if gradients is None else _addresses(gradients),
        len(source),
        source.dtype == torch.bfloat16,
    )
    if failed:
        raise _ERRORS[failed]


def _addresses(tensors: Sequence[Tensor | None]) -> Any:
    return (c_void_p * len(tensors))(*map(_address, tensors))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The library that computes blocks; None where it cannot be built."""
    try:
        library = open_library()
    except BuildError:  # whoever reads images says so
        return None
    library.mixer_block_kept.restype = c_int64
    library.mixer_block_kept.argtypes = [c_void_p, c_void_p, c_int64]
    library.mixer_block.argtypes = [c_void_p, c_int, *7 * [c_void_p], c_int64, c_int]
    return library


@functools.cache
def _team() -> int | None:
    """The address of the function that starts PyTorch's own threads; None where its OpenMP is not GNU's."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, c_void_p).value
    except (AttributeError, TypeError):  # TypeError: Windows
        return None
