"""What the loop asks of an engine, and the state that every engine can write and read."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import binary_cross_entropy_with_logits

from pipeline.data.loader import Batch
from pipeline.engine.average import Ema, swapped
from pipeline.optim import averages_itself, group_scalars, schedule_free_average, set_group_scalars, set_rate
from pipeline.recipe.train import TrainSection
from pipeline.topology import Topology

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

    model: dict[str, torch.Tensor]  # to evaluate with
    optimizer: dict[str, torch.Tensor]  # "<slot>/<parameter>", e.g. "exp_avg/stem.proj.weight"
    scalars: dict[str, float] = field(default_factory=dict)  # the loss scale of fp16, counters
    ema: dict[str, torch.Tensor] = field(default_factory=dict)  # as `model`, averaged; empty without train.ema_decay


class Engine(ABC):
    """Knows how to step; the loop knows when.

    The optimiser's own tensors ("owners") may be the parameters, their shards, or flat slices that many parameters
    share. What lies where is all that a kind of engine has to say for states, averages and loading to work.
    """

    config: Mapping[str, Any] | None = None  # what a library was told, for the run folder
    scaler = torch.amp.GradScaler("cpu", enabled=False)  # of fp16, in engines that have torch's

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, train: TrainSection, topology: Topology):
        self.module = module  # the network itself, to evaluate with
        self.optimizer = optimizer
        self.device = topology.device
        self.is_main = topology.is_main
        self.loss = LOSSES[train.loss]
        owned = {name for name, _ in self.owned()}
        self._others = [name for name in module.state_dict() if name not in owned]
        self.ema = Ema(train, self._averaged()) if train.ema_decay is not None else None

    def step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """One optimiser step over the micro-batches of this rank, at this learning rate."""
        set_rate(self.optimizer, lr)
        result = self.train_step(batches)
        if self.ema:
            self.ema.update(self._averaged())
        return result

    @abstractmethod
    def train_step(self, batches: Sequence[Batch]) -> StepResult:
        """Forward, backward, clip and update."""

    @abstractmethod
    def evaluate_mode(self) -> torch.autocast:
        """A context in which `module` computes in the precision of training."""

    @abstractmethod
    def owners(self) -> list[torch.Tensor]:
        """The fp32 tensors that the optimiser keeps its state by."""

    @abstractmethod
    def owned(self) -> Iterator[tuple[str, int]]:
        """Each parameter's name, and which of the owners it lies in."""

    @abstractmethod
    def gather(self, name: str, kept: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter on every rank, from what lies as its owner does on this one."""

    @abstractmethod
    def scatter(self, name: str, whole: torch.Tensor, kept: torch.Tensor) -> None:
        """The reverse: write this rank's part of `whole` to its place in `kept`."""

    def publish(self) -> None:  # noqa: B027 - most engines' modules share the owners' memory
        """Let the module follow a change of the owners."""

    def weights(self) -> dict[str, AbstractContextManager]:
        """The weights worth evaluating, by the prefix of their figures: contexts in which `module` has them.

        Every rank enters them together. "" are the raw ones, or the optimiser's own average where it has one.
        """
        found: dict[str, AbstractContextManager] = {"": nullcontext()}
        if averages_itself(self.optimizer):
            found[""] = swapped(self._masters(), self._schedule_free(), self.publish)
        if self.ema:
            found["ema_"] = swapped(self._averaged(), self.ema.tensors, self.publish)
        return found

    def state(self) -> State:
        """The whole state, on the CPU, gathered tensor by tensor. Every rank calls it; rank 0's is complete."""
        model = {name: self.read(name) for name in self._others}
        averages = dict(model) if self.ema else {}
        slots: dict[str, torch.Tensor] = {}
        owners, masters = self.owners(), self._masters()
        evaluated = self._schedule_free() if averages_itself(self.optimizer) else masters
        for name, index in self.owned():
            self._keep(model, name, self.gather(name, evaluated[index]))
            if evaluated is not masters:
                self._keep(slots, f"y/{name}", self.gather(name, masters[index]))
            if self.ema:
                self._keep(averages, name, self.gather(name, self.ema.tensors[index].to(self.device)))
            for slot, kept in self.optimizer.state.get(owners[index], {}).items():
                if isinstance(kept, torch.Tensor):
                    whole = kept if slot == "step" else self.gather(name, _local(kept))
                    self._keep(slots, f"{slot}/{name}", whole)
        scalars = group_scalars(self.optimizer)
        if self.scaler.is_enabled():
            scalars |= {name: float(self.scaler.state_dict()[kept]) for name, kept in _SCALER.items()}
        if self.ema:
            scalars["ema_updates"] = self.ema.updates
            buffers = self.ema.tensors[len(owners) :]
            averages |= {name: kept.cpu().clone() for name, kept in zip(self._float_buffers(), buffers, strict=True)}
        return State(model, slots, scalars, averages)

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Take over a state, whichever engine and world size wrote it. Every rank calls it."""
        for name in self._others:
            self.write(name, state.model[name])
        owners, masters, slots = self.owners(), self._masters(), by_parameter(state.optimizer)
        self.optimizer.state.clear()
        for name, index in self.owned():
            kept = dict(slots.get(name, {}))
            self.scatter(name, kept.pop("y", state.model[name]), masters[index])
            for slot, value in kept.items():
                self._load_slot(name, owners[index], slot, value)
        set_group_scalars(self.optimizer, state.scalars)
        if self.scaler.is_enabled() and state.scalars.keys() >= _SCALER.keys():
            known = {kept: state.scalars[name] for name, kept in _SCALER.items()}
            self.scaler.load_state_dict(self.scaler.state_dict() | known)
        if self.ema:
            self._load_ema(self.ema, state)
        self.publish()

    def read(self, name: str) -> torch.Tensor:
        """A buffer, or a parameter that the optimiser does not own, on the CPU."""
        return self.module.state_dict()[name].detach().cpu().clone()

    def write(self, name: str, value: torch.Tensor) -> None:
        """The reverse of `read`."""
        self.module.state_dict()[name].copy_(value)

    def _masters(self) -> list[torch.Tensor]:
        """What this rank has of the fp32 weights, as the optimiser keeps it."""
        return [_local(owner.detach()) for owner in self.owners()]

    def _averaged(self) -> list[torch.Tensor]:
        """What an average is taken of: the weights and the statistics of batch norms."""
        return self._masters() + list(self._float_buffers().values())

    def _float_buffers(self) -> dict[str, torch.Tensor]:
        buffers = dict(self.module.named_buffers())
        return {name: buffers[name] for name in self._others if name in buffers and buffers[name].is_floating_point()}

    def _schedule_free(self) -> list[torch.Tensor]:
        owners = self.owners()
        return [_local(schedule_free_average(self.optimizer, owner).detach()) for owner in owners]

    def _keep(self, tensors: dict[str, torch.Tensor], key: str, whole: torch.Tensor) -> None:
        if self.is_main:
            tensors[key] = whole.detach().to("cpu", torch.float32, copy=True)

    def _load_slot(self, name: str, owner: torch.Tensor, slot: str, value: torch.Tensor) -> None:
        kept = self.optimizer.state[owner]
        if slot == "step":  # AdamW counts its steps on the CPU unless it is fused
            kept[slot] = value.to(owner.device if self.optimizer.defaults.get("fused") else "cpu", copy=True)
            return
        if slot not in kept:
            kept[slot] = torch.zeros_like(owner)
        self.scatter(name, value, _local(kept[slot]))

    def _load_ema(self, ema: Ema, state: State) -> None:
        """The state's average; one that has none starts from the state's weights."""
        source = state.ema or state.model
        for name, index in self.owned():
            self.scatter(name, source[name], ema.tensors[index])
        for name, kept in zip(self._float_buffers(), ema.tensors[len(self.owners()) :], strict=True):
            kept.copy_(source[name])
        ema.updates = round(state.scalars.get("ema_updates", 0))


def softmax_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over the batch of -sum p log softmax: logits and probabilities [B, classes] to a scalar in float32."""
    return -(targets * logits.float().log_softmax(dim=-1)).sum(dim=-1).mean()


def sigmoid_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over the batch of the binary cross-entropies of all classes together (Beyer et al. 2020)."""
    loss = binary_cross_entropy_with_logits(logits.float(), targets, reduction="none")
    return loss.sum(dim=-1).mean()


# The scale, and the steps since it last changed, by their names in torch.
_SCALER = {"loss_scale": "scale", "loss_scale_steps": "_growth_tracker"}

LOSSES = {"softmax": softmax_loss, "sigmoid": sigmoid_loss}


def by_parameter(slots: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The optimiser of a `State`, parameter by parameter: name -> slot -> tensor."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in slots.items():
        slot, name = key.split("/", 1)
        found.setdefault(name, {})[slot] = value
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
