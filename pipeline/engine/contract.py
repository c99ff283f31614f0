"""What the loop asks of an engine."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from pipeline.data.loader import Batch
from pipeline.distributed.topology import Topology
from pipeline.engine.average import Ema, swapped
from pipeline.engine.loss import LOSSES
from pipeline.engine.state import Part, State, by_parameter
from pipeline.optim.build import averages_itself, group_scalars, schedule_free_average, set_group_scalars, set_rate
from pipeline.recipe.train import TrainSection


@dataclass(frozen=True)
class StepResult:
    """Of one optimiser step on this rank, still on the device: mean loss over its pictures, global gradient norm."""

    loss: torch.Tensor
    grad_norm: torch.Tensor


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
        """Forward, backward, clip and update; a gradient that is not finite changes nothing."""

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
    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole parameter."""

    @abstractmethod
    def gather(self, name: str, kept: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter on every rank, from what lies as its owner does on this one."""

    @abstractmethod
    def part(self, name: str, kept: torch.Tensor) -> tuple[int, torch.Tensor]:
        """The run of a flattened parameter that is this rank's to save, [n], and its place in the whole."""

    @abstractmethod
    def scatter(self, name: str, whole: torch.Tensor, kept: torch.Tensor) -> None:
        """The reverse: write this rank's part of `whole` to its place in `kept`."""

    def update(self, norm: torch.Tensor) -> None:
        """The optimiser's step, unless the gradient's norm is not finite: then nothing but fp16's scale changes."""
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif norm.isfinite():
            self.optimizer.step()

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
        tensors: dict[str, torch.Tensor] = {}
        for key, name, kept in self._owned_tensors():
            whole = self.gather(name, kept)
            if self.is_main:
                tensors[key] = _copied(whole)
        tensors |= self._common_tensors()
        return State.of(tensors, self.scalars())

    def parts(self) -> list[Part]:
        """This rank's part of the state, copied to the CPU: nothing is gathered. Every rank calls it."""
        found = []
        for key, name, kept in self._owned_tensors():
            start, values = self.part(name, kept)
            found.append(Part(key, self.shape(name), start, _copied(values)))
        for key, whole in self._common_tensors().items():
            if self.is_main:
                found.append(Part(key, tuple(whole.shape), 0, whole.reshape(-1)))
        return found

    def scalars(self) -> dict[str, float]:
        """What of the state is a number."""
        found = group_scalars(self.optimizer)
        if self.scaler.is_enabled():
            found |= {name: float(self.scaler.state_dict()[kept]) for name, kept in _SCALER.items()}
        return found | {"ema_updates": self.ema.updates} if self.ema else found

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

    def _owned_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Of the state what lies as the owners do: its key, its parameter's name, and what this rank has."""
        owners, masters = self.owners(), self._masters()
        evaluated = self._schedule_free() if averages_itself(self.optimizer) else masters
        for name, index in self.owned():
            yield f"model/{name}", name, evaluated[index]
            if evaluated is not masters:
                yield f"optimizer/y/{name}", name, masters[index]
            if self.ema:
                yield f"ema/{name}", name, self.ema.tensors[index]
            for slot, kept in self.optimizer.state.get(owners[index], {}).items():
                if isinstance(kept, torch.Tensor) and slot != "step":
                    yield f"optimizer/{slot}/{name}", name, _local(kept)

    def _common_tensors(self) -> dict[str, torch.Tensor]:
        """The rest, which every rank has whole: copies on the CPU. Every rank calls it."""
        owners = self.owners()
        buffers = {name: self.read(name) for name in self._others}
        found = {f"model/{name}": whole for name, whole in buffers.items()}
        if self.ema:
            averaged = zip(self._float_buffers(), self.ema.tensors[len(owners) :], strict=True)
            buffers |= {name: _copied(kept) for name, kept in averaged}
            found |= {f"ema/{name}": whole for name, whole in buffers.items()}
        for name, index in self.owned():
            steps = self.optimizer.state.get(owners[index], {}).get("step")
            if isinstance(steps, torch.Tensor):
                found[f"optimizer/step/{name}"] = _copied(steps)
        return found

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


# The scale, and the steps since it last changed, by their names in torch.
_SCALER = {"loss_scale": "scale", "loss_scale_steps": "_growth_tracker"}


def share(whole: torch.Tensor) -> tuple[int, torch.Tensor]:
    """The part that a rank saves of what all ranks have: as many values each, and where they begin."""
    rank, world = dist.get_rank(), dist.get_world_size()
    first, stop = (whole.numel() * turn // world for turn in (rank, rank + 1))
    return first, whole.reshape(-1)[first:stop]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
