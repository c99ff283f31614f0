"""What the loop asks of an engine, and the state that every engine can write and read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from pipeline.data.loader import Batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """A context that computes in `dtype`; in float32 it changes nothing."""
    return torch.autocast(device.type, dtype, enabled=dtype is not torch.float32)


@dataclass(frozen=True)
class StepResult:
    """Of one optimiser step on this rank, still on the device: mean loss over its pictures, global gradient norm."""

    loss: torch.Tensor
    grad_norm: torch.Tensor


@dataclass(frozen=True)
class State:
    """Weights and optimiser by parameter name, in fp32 and whole: any engine on any world size can load it."""

    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]  # "<slot>/<parameter>", e.g. "exp_avg/stem.proj.weight"
    scalars: dict[str, float] = field(default_factory=dict)  # the loss scale of fp16


class Engine(Protocol):
    """Knows how to step; the loop knows when."""

    module: nn.Module  # the network itself, to evaluate with

    def step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """One optimiser step over the micro-batches of this rank, at this learning rate."""

    def evaluate_mode(self) -> torch.autocast:
        """A context in which `module` computes in the precision of training."""

    def state(self) -> State:
        """The whole state, on the CPU. Every rank calls it; rank 0's answer is complete."""

    def load(self, state: State) -> None:
        """Take over a state, whichever engine and world size wrote it. Every rank calls it."""


def softmax_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over the batch of -sum p log softmax: logits and probabilities [B, classes] to a scalar in float32."""
    return -(targets * logits.float().log_softmax(dim=-1)).sum(dim=-1).mean()


def sigmoid_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over the batch of the binary cross-entropies of all classes together (Beyer et al. 2020)."""
    loss = binary_cross_entropy_with_logits(logits.float(), targets, reduction="none")
    return loss.sum(dim=-1).mean()


LOSSES = {"softmax": softmax_loss, "sigmoid": sigmoid_loss}


def by_parameter(slots: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The optimiser of a `State`, parameter by parameter: name -> slot -> tensor."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in slots.items():
        slot, name = key.split("/", 1)
        found.setdefault(name, {})[slot] = value
    return found


def read_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The slots of an optimiser that holds the module's own parameters, on the CPU and named as in `State`."""
    names: dict[torch.Tensor, str] = {p: name for name, p in module.named_parameters()}
    return {
        f"{slot}/{names[p]}": value.detach().cpu().clone()
        for p, slots in optimizer.state.items()
        for slot, value in slots.items()
        if isinstance(value, torch.Tensor)
    }


def write_optimizer(slots: dict[str, torch.Tensor], module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The reverse of `read_optimizer`."""
    parameters = dict(module.named_parameters())
    for name, kept in by_parameter(slots).items():
        for slot, value in kept.items():
            # AdamW counts its steps on the CPU unless it is fused.
            on_cpu = slot == "step" and not optimizer.defaults.get("fused")
            device = torch.device("cpu") if on_cpu else parameters[name].device
            optimizer.state[parameters[name]][slot] = value.to(device, copy=True)


def read_model(module: nn.Module) -> dict[str, torch.Tensor]:
    """Weights and buffers on the CPU, their own copies."""
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
