"""A block, the layers of its mixings and their permutations, as the ways to compute blocks read them."""

from collections.abc import Iterator
from typing import Protocol, Self, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from widemix.models.permutation import Permute, Transpose, commutation, identity
from widemix.models.pk_layers import Mixing, MixingLayer
from widemix.models.structured import StructuredLinear

_checked: WeakKeyDictionary[Permute, tuple[Tensor, int]] = WeakKeyDictionary()


class _Module(Protocol):
    """A torch module as far as it is used here, from which a protocol can't be derived."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def train(self) -> Self: ...
    def float(self) -> Self: ...
    def zero_grad(self) -> None: ...


class Block(_Module, Protocol):
    """U = skip(X) + drop_path1(mlp_tokens(norm1(X))), Y = channel_skip(U) + drop_path2(mlp_channels(norm2(U))).

    A module that computes this, in training with the batch last in memory where `batch_last` is true.
    """

    skip: nn.Module
    norm1: nn.Module
    mlp_tokens: Mixing
    drop_path1: nn.Module
    channel_skip: nn.Module
    norm2: nn.Module
    mlp_channels: Mixing
    drop_path2: nn.Module
    batch_last: bool

    def fits_batch_last(self) -> bool:
        """Whether it can be computed so."""


def features_of(block: Block) -> tuple[int, int]:
    """S0 and C of the features [B, S0, C] that a block takes."""
    tokens, channels = (layers_of(mixing)[0].in_features for mixing in (block.mlp_tokens, block.mlp_channels))
    return tokens, channels


def layers_of(mixing: Mixing) -> tuple[nn.Linear, nn.Linear]:
    """The first and the last layer, which may be one."""
    layers = (mixing.fc, mixing.fc) if isinstance(mixing, MixingLayer) else (mixing.fc1, mixing.fc2)
    return cast(tuple[nn.Linear, nn.Linear], layers)


def weight_of(layer: nn.Module) -> Tensor | None:
    """W [D, d], of a structured layer the dense matrix of its factors; None where there is no weight."""
    return layer.dense_weight() if isinstance(layer, StructuredLinear) else getattr(layer, "weight", None)


def index_of(module: nn.Module, rows: int, columns: int) -> Tensor:
    """The permutation of the flattened [rows, columns] that a module of a mixing is, int32 on the CPU."""
    if isinstance(module, Permute):
        return sound_index(module).cpu()
    return commutation(rows, columns) if isinstance(module, Transpose) else identity(rows * columns)


def sound_index(module: Permute) -> Tensor:
    """Its index, int32, by which kernels write; checked once, and again if it has changed. Raises ValueError."""
    known, version = _checked.get(module, (None, None))
    if known is not module.index or version != module.index._version:
        module.check_indices()
        _checked[module] = (module.index, module.index._version)
    return module.index.to(torch.int32).contiguous()


def versions_of(*modules: nn.Module | None) -> list[tuple[Tensor, int]]:
    """The indices of those that are permutations, and how often each was changed in place."""
    return [(module.index, module.index._version) for module in modules if isinstance(module, Permute)]


def same_versions(some: list[tuple[Tensor, int]], others: list[tuple[Tensor, int]]) -> bool:
    """Whether nothing has changed between two calls of `versions_of` on the same modules."""
    return all(a is b and v == w for (a, v), (b, w) in zip(some, others, strict=True))
