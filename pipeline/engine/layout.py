"""Parameters as FSDP2 and DeepSpeed take them, contiguous and with a dimension; and tensors with several names."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase


class _Adapted:
    """Mixed into a module whose parameters an engine has changed: the module's own code sees them as `_seen` says."""

    _seen: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]  # by the parameter's name in the module

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        see = type(self)._seen.get(name)
        if see is None or value is None or isinstance(value, DTensor) or not value.numel():  # it is sharded now
            return value
        return see(value)


@torch.no_grad()
def adapt_parameters(module: nn.Module, half: bool) -> None:
    """Change a network in place to what FSDP2 and DeepSpeed take; names, and what it computes, stay.

    Parameters become contiguous, those without a dimension get one. With `half`, where these engines compute with
    parameters in half precision, batch norms see theirs in the float32 of their running statistics.
    """
    for part in list(module.modules()):
        own = dict(part.named_parameters(recurse=False))
        seen: dict[str, Any] = {name: _scalar for name, parameter in own.items() if parameter.ndim == 0}
        if half and isinstance(part, _NormBase) and part.track_running_stats:
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
    return [
        part
        for part in blocks.children()
        if not isinstance(part, nn.ModuleList | nn.ModuleDict)  # which are not called
        and all(everywhere[parameter] == count for parameter, count in _uses(part).items())
    ]


def _uses(module: nn.Module) -> Counter[int]:
    """How many names each parameter has."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
