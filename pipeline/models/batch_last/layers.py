"""The layers of a mixing and its permutations, as the ways to compute blocks read them."""

from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from widemix.models.permutation import Permute, Transpose, commutation, identity
from widemix.models.pk import Mixing, MixingLayer

_checked: WeakKeyDictionary[Permute, tuple[Tensor, int]] = WeakKeyDictionary()


def layers_of(mixing: Mixing) -> tuple[nn.Linear, nn.Linear]:
    """The first and the last layer, which may be one."""
    layers = (mixing.fc, mixing.fc) if isinstance(mixing, MixingLayer) else (mixing.fc1, mixing.fc2)
    return cast(tuple[nn.Linear, nn.Linear], layers)


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
