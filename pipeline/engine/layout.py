"""Networks as FSDP2 and DeepSpeed take them: parameters contiguous and with a dimension, one rule for dtypes.

In half precision both engines compute with parameters of that dtype, and buffers stay in theirs, as with DDP. A batch
norm sees its parameters in the float32 of its statistics. A network with other floating-point buffers (tables of
positions, filters) mixes dtypes: it computes under autocast, as with DDP, and its norms see float32 too.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from widemix.data.precision import autocast
from widemix.optim.dtensor import is_dtensor

_MIXED_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm)  # on CPUs autocast does not cast what these are given


class _Adapted:
    """Mixed into a module whose parameters an engine has changed: the module's own code sees them as `_seen` says."""

    _seen: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]  # by the parameter's name in the module

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        see = type(self)._seen.get(name)
        if see is None or value is None or is_dtensor(value) or not value.numel():  # it is sharded now
            return value
        return see(value)


class _MixesDtypes:
    """Mixed into a network that has floating-point buffers: products in `_dtype`, whatever their operands are in."""

    _dtype: torch.dtype

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with autocast(inputs.device, self._dtype):
            output: torch.Tensor = super().forward(inputs)  # type: ignore[misc]
        return output


def adapt_network(module: nn.Module, dtype: torch.dtype) -> None:
    """Change a network in place to what FSDP2 and DeepSpeed take; names, and what it computes, stay.

    dtype: in which these engines compute with parameters.
    """
    half = dtype != torch.float32
    mixes = half and any(_has_tables(part) for part in module.modules())
    _adapt_parameters(module, float32=_MIXED_NORMS if mixes else _NormBase if half else ())
    if mixes:
        module.__class__ = type(type(module).__name__, (_MixesDtypes, type(module)), {"_dtype": dtype})


def _has_tables(part: nn.Module) -> bool:
    """Whether a module has floating-point buffers that are not the statistics of a batch norm."""
    return not isinstance(part, _NormBase) and any(buffer.is_floating_point() for buffer in part.buffers(False))


@torch.no_grad()
def _adapt_parameters(module: nn.Module, float32: Any) -> None:
    """Make parameters contiguous, and give those without a dimension one.

    float32: classes of norms that see their parameters in float32.
    """
    for part in list(module.modules()):
        own = dict(part.named_parameters(recurse=False))
        seen: dict[str, Any] = {name: _scalar for name, parameter in own.items() if parameter.ndim == 0}
        if isinstance(part, float32) and getattr(part, "track_running_stats", True):
            seen |= dict.fromkeys(own, torch.Tensor.float)
        if seen:
            part.__class__ = type(type(part).__name__, (_Adapted, type(part)), {"_seen": seen})
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous().view(parameter.shape or (1,))


def _scalar(value: torch.Tensor) -> torch.Tensor:
    return value.view(())


def all_names(module: nn.Module) -> dict[str, list[str]]:
    """The names in `module.state_dict()` of each of its tensors, by the first of them; tied weights have several."""
    names: dict[int, list[str]] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    saved = module.state_dict().keys()
    for name, tensor in tensors:
        if name in saved:
            names.setdefault(id(tensor), []).append(name)
    return {first: [first, *others] for first, *others in names.values()}


def separable_blocks(module: nn.Module) -> list[nn.Module]:
    """The parts of `module.blocks` that share no parameter with the rest of the network."""
    blocks = getattr(module, "blocks", None)
    if not isinstance(blocks, nn.Module):
        return []
    everywhere = _uses(module)
    uses = ((part, _uses(part).items()) for part in _called_parts(blocks))
    return [part for part, own in uses if own and all(everywhere[parameter] == count for parameter, count in own)]


def _called_parts(blocks: nn.Module) -> Iterator[nn.Module]:
    """The blocks, each within its stage where there are stages: activation checkpointing calls them one by one."""
    for part in blocks.children():
        if type(part) is nn.Sequential:
            yield from _called_parts(part)
        elif not isinstance(part, nn.ModuleList | nn.ModuleDict):  # which are not called
            yield part


def _uses(module: nn.Module) -> Counter[int]:
    """How many names each parameter has."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
