"""The state that every engine can write and read, on any number of ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class State:
    """Weights and optimiser by parameter name, in fp32 and whole: any engine on any world size can load it."""

    model: dict[str, torch.Tensor]  # to evaluate with
    optimizer: dict[str, torch.Tensor]  # "<slot>/<parameter>", e.g. "exp_avg/stem.proj.weight"
    scalars: dict[str, float] = field(default_factory=dict)  # the loss scale of fp16, counters
    ema: dict[str, torch.Tensor] = field(default_factory=dict)  # as `model`, averaged; empty without train.ema_decay

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor], scalars: dict[str, float]) -> "State":
        """From keys as `Part` has them."""
        state = State({}, {}, scalars)
        for key, tensor in tensors.items():
            kind, name = key.split("/", 1)
            getattr(state, kind)[name] = tensor
        return state


@dataclass(frozen=True)
class Part:
    """What one rank saves of a tensor: a run of it, flattened, on the CPU in fp32. All ranks' parts are the whole."""

    key: str  # "model/<parameter>", "optimizer/<slot>/<parameter>" or "ema/<parameter>"
    shape: tuple[int, ...]  # of the whole
    start: int
    values: torch.Tensor  # [n]


def by_parameter(slots: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The optimiser of a `State`, parameter by parameter: name -> slot -> tensor."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in slots.items():
        slot, name = key.split("/", 1)
        found.setdefault(name, {})[slot] = value
    return found
