"""The state that every engine can write and read, on any number of ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class State:
    """Weights and optimizer state by parameter name, whole, in fp32: any engine on any world size can load them."""

    model: dict[str, torch.Tensor]  # to evaluate with
    optimizer: dict[str, torch.Tensor]  # "<state>/<parameter>", e.g. "exp_avg/stem.proj.weight"
    scalars: dict[str, float] = field(default_factory=dict)  # the loss scale of fp16, counters
    ema: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # as `model`, the average; empty without train.ema_decay

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor], scalars: dict[str, float]) -> "State":
        """A state from whole tensors under the keys of `Shard`."""
        state = State({}, {}, scalars)
        for key, tensor in tensors.items():
            kind, name = key.split("/", 1)
            getattr(state, kind)[name] = tensor
        return state


@dataclass(frozen=True)
class Shard:
    """The part that one rank saves of a tensor of the state: a slice of it, flattened, on the CPU in fp32.

    The shards of all ranks together are the tensor, without overlap.
    """

    key: str  # "model/<parameter>", "optimizer/<state>/<parameter>" or "ema/<parameter>"
    shape: tuple[int, ...]  # of the whole tensor
    start: int  # index of the first value in the flattened tensor
    values: torch.Tensor  # [n]


def by_parameter(states: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """A `State`'s "optimizer" by parameter: name -> state -> tensor."""
    parameters: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in states.items():
        kind, name = key.split("/", 1)
        parameters.setdefault(name, {})[kind] = value
    return parameters
