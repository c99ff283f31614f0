"""A network's weights and its optimizer's state on many ranks: where they lie, and one state that any can load."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from widemix.distributed.topology import Topology
from widemix.engine.batch_norm import Frozen
from widemix.engine.ema import Ema, swapped
from widemix.engine.layout import all_names
from widemix.engine.state import Shard, State, by_parameter
from widemix.errors import InputError
from widemix.optim.build import group_scalars, set_group_scalars
from widemix.optim.dtensor import local_part
from widemix.optim.section import OptimSection
from widemix.recipe.sections import TrainSection


class ShardedModel(ABC):
    """A network and its optimizer, whose weights and states may be spread over ranks.

    Three words say where a weight lies:

    - An *optimizer tensor* is an fp32 tensor that the optimizer updates and keeps its state for. With DDP and ZeRO 0
      it is a whole parameter; with FSDP2 a parameter as a DTensor, of which each rank has some rows; with ZeRO 1 to 3
      a one-dimensional tensor in which slices of many flattened parameters lie end to end.
    - A *local tensor* is what this rank has of an optimizer tensor. A state tensor of the optimizer, and an EMA, have
      a local tensor of the same layout for each optimizer tensor.
    - A *shard* is the flat slice of one parameter that a rank saves: values [n] of the flattened parameter from some
      index on. The shards of all ranks together are the parameter, without overlap.

    An engine says how parameters, optimizer tensors and shards correspond (the abstract methods below); states, EMA,
    saving and loading are written once, here.
    """

    replica: tuple[int, int] = (0, 1)  # this rank's number among the ranks that have the same slices, and their count

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        optim: OptimSection,
        train: TrainSection,
        topology: Topology,
    ):
        """Every rank calls it, when `optimizer_tensors` and `param_positions` can answer."""
        self.module = module  # the network itself, to evaluate with
        self.optimizer = optimizer
        self.spec = optim.spec
        self.device = topology.device
        self.is_main = topology.is_main
        optimized = {name for name, _ in self.param_positions()}
        self._names = all_names(module)
        self._unoptimized = [name for name in self._names if name not in optimized]  # buffers, frozen weights
        self.ema = Ema(train, self._ema_sources()) if train.ema_decay is not None else None

    @abstractmethod
    def optimizer_tensors(self) -> list[torch.Tensor]:
        """This rank's optimizer tensors, in a fixed order: the keys of the optimizer's state."""

    @abstractmethod
    def param_positions(self) -> Iterator[tuple[str, int]]:
        """(name, index) of each parameter that the optimizer updates: it lies in `optimizer_tensors()[index]`.

        The same parameters in the same order on every rank, also where a rank has nothing of one.
        """

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole parameter."""

    @abstractmethod
    def full_tensor(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """The whole of parameter `name`, of `shape(name)`. Every rank calls it, and every rank gets it.

        Args:
            name: one of `param_positions`.
            local: a local tensor with the layout of its optimizer tensor: of the weights, of a state, or of the EMA.
        """

    @abstractmethod
    def local_slice(self, name: str, local: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Return what this rank has of a parameter: the first index in the flattened parameter, a view [n] of local.

        Arguments as for `full_tensor`. Communicates nothing; n may be 0.
        """

    def local_shard(self, name: str, local: torch.Tensor) -> tuple[int, torch.Tensor]:
        """This rank's shard of parameter `name`, as `local_slice`: its part of what several ranks may have."""
        start, values = self.local_slice(name, local)
        number, copies = self.replica
        first, stop = (len(values) * turn // copies for turn in (number, number + 1))
        return start + first, values[first:stop]

    def load_shard(self, name: str, whole: torch.Tensor, local: torch.Tensor) -> None:
        """Copy from `whole` what lies on this rank to its place in `local`: the reverse of `full_tensor`.

        Reads nothing else of `whole`, which may be a file mapped into memory. Communicates nothing.
        """
        start, values = self.local_slice(name, local)
        values.copy_(whole.reshape(-1)[start : start + len(values)])

    def sync_module(self) -> None:  # noqa: B027 - DDP and ZeRO 0 have nothing to do
        """Update the module's own weights after a change of the optimizer tensors. Every rank calls it."""

    def weights(self) -> dict[str, AbstractContextManager]:
        """The weights to evaluate, by the prefix of their metrics: contexts in which `module` has them.

        "" are the trained weights, or the optimizer's own average where it has one; "ema_" the EMA. Every rank enters
        them together.
        """
        contexts: dict[str, AbstractContextManager] = {"": nullcontext()}
        if self.spec.evaluation_weight:
            contexts[""] = swapped(self._masters(), self._evaluation_weights(), self.sync_module)
        if self.ema:
            contexts["ema_"] = swapped(self._ema_sources(), self.ema.tensors, self.sync_module)
        return contexts

    def state(self) -> State:
        """The whole state on the CPU, gathered one tensor at a time. Every rank calls it; rank 0's is complete."""
        tensors: dict[str, torch.Tensor] = {}
        for key, name, local in self._distributed_tensors():
            whole = self.full_tensor(name, local)
            if self.is_main:
                tensors[key] = _copied(whole)
        tensors |= self._replicated_tensors()
        return State.of(tensors, self.scalars())

    def local_shards(self) -> list[Shard]:
        """This rank's shards of the state, copied to the CPU; nothing optimized is gathered. Every rank calls it."""
        shards = []
        for key, name, local in self._distributed_tensors():
            start, values = self.local_shard(name, local)
            shards.append(Shard(key, self.shape(name), start, _copied(values)))
        for key, whole in self._replicated_tensors().items():
            if self.is_main:
                shards.append(Shard(key, tuple(whole.shape), 0, whole.reshape(-1)))
        return shards

    def scalars(self) -> dict[str, float]:
        """The numbers of the state: the optimizer's counters, the EMA's updates, and fp16's loss scale."""
        scalars = group_scalars(self.optimizer, self.spec.group_counters)
        return scalars | {"ema_updates": float(self.ema.updates)} if self.ema else scalars

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Replace the engine's state, whichever engine and world size wrote it. Every rank calls it."""
        own = self.module.state_dict(keep_vars=True)
        for name in self._unoptimized:
            self.write(name, own[name], state.model[name])
        tensors, masters, states = self.optimizer_tensors(), self._masters(), by_parameter(state.optimizer)
        self._check_steps(states)
        self.optimizer.state.clear()
        for name, index in self.param_positions():
            values = dict(states.get(name, {}))
            self.load_shard(name, values.pop("y", state.model[name]), masters[index])
            for kind, value in values.items():
                self._load_optimizer_state(name, tensors[index], kind, value)
        set_group_scalars(self.optimizer, self.spec.group_counters, state.scalars)
        if self.ema:
            self._load_ema(self.ema, state)
        self.sync_module()

    def _check_steps(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """`InputError` where parameters whose steps are counted together have taken different numbers of them.

        Together are those of an optimizer tensor, which has many with ZeRO, or of a group that has `group_counters`.
        """
        tensors, first = self.optimizer_tensors(), dict[int, tuple[str, Any]]()
        groups = {id(p): number for number, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        for name, index in self.param_positions():
            count = groups.get(id(tensors[index])) if self.spec.group_counters else index
            if count is None:  # frozen
                continue
            own = states.get(name, {})
            found = bool(own.keys() - {"y"}), own["step"].item() if "step" in own else 0  # y are its weights
            other, expected = first.setdefault(count, (name, found))
            if found != expected:
                together = "the optimizer" if self.spec.group_counters else "ZeRO, unlike engine.kind ddp and fsdp,"
                raise InputError(
                    f"the checkpoint has another optimizer state of {name} than of {other}, as after other "
                    f"train.freeze, and {together} counts their steps together; keep train.freeze, or take weights "
                    "alone by train.init_from"
                )

    @torch.no_grad()
    def weight_norm(self) -> float:
        """L2 norm of the fp32 values of the parameters that are not frozen. Every rank calls it."""
        return math.sqrt(self._sum(lambda shard: shard.double().square().sum()))

    @torch.no_grad()
    def zero_weights(self) -> float:
        """How many of the same values are exactly zero, in %. Every rank calls it."""
        zeros, values = self._sum(lambda shard: (shard == 0).sum()), self._sum(lambda shard: torch.tensor(len(shard)))
        return 100 * zeros / values

    def read(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """A CPU copy of a buffer, or of a parameter that the optimizer does not update. Every rank calls it.

        own: the module's tensor of this name.
        """
        return own.detach().cpu().clone()

    def write(self, name: str, own: torch.Tensor, value: torch.Tensor) -> None:
        """The reverse of `read`. Every rank calls it."""
        own.copy_(value)

    def _sum(self, of: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """The sum of `of` over the shards of the fp32 parameters that are not frozen. Every rank calls it."""
        masters, frozen = self._masters(), {n for n, p in self.module.named_parameters() if not p.requires_grad}
        positions = [each for each in self.param_positions() if each[0] not in frozen]
        shards = (self.local_shard(name, masters[index])[1] for name, index in positions)
        total = sum((of(shard).double() for shard in shards), torch.zeros((), dtype=torch.float64, device="cpu"))
        total = torch.as_tensor(total, device=self.device)
        dist.all_reduce(total)
        return total.item()

    def _masters(self) -> list[torch.Tensor]:
        """The local tensors of the fp32 weights."""
        return [local_part(tensor.detach()) for tensor in self.optimizer_tensors()]

    def _ema_sources(self) -> list[torch.Tensor]:
        """Return what the EMA averages: the weights and the statistics of batch norms."""
        return self._masters() + list(self._float_buffers().values())

    def _float_buffers(self) -> dict[str, torch.Tensor]:
        """The statistics of batch norms that are not frozen, by name."""
        modules, buffers = dict(self.module.named_modules()), dict(self.module.named_buffers())
        names = (name for name in self._unoptimized if name in buffers)
        names = (name for name in names if not isinstance(modules[name.rpartition(".")[0]], Frozen))
        return {name: buffers[name] for name in names if buffers[name].is_floating_point()}

    def _evaluation_weights(self) -> list[torch.Tensor]:
        """The local tensors of the weights to evaluate with: the trained ones, unless the optimizer averages."""
        average = self.spec.evaluation_weight
        if average is None:
            return self._masters()
        return [local_part(average(self.optimizer, tensor).detach()) for tensor in self.optimizer_tensors()]

    def _distributed_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(key in the state, parameter's name, local tensor) of all that has the layout of the optimizer tensors.

        Where the optimizer averages, "model" is the average, and the trained weights are the state "y".
        """
        tensors, masters, evaluated = self.optimizer_tensors(), self._masters(), self._evaluation_weights()
        for name, index in self.param_positions():
            for each in self._names[name]:
                yield f"model/{each}", name, evaluated[index]
                if self.ema:
                    yield f"ema/{each}", name, self.ema.tensors[index]
            if self.spec.evaluation_weight:
                yield f"optimizer/y/{name}", name, masters[index]
            for kind, value in self.optimizer.state.get(tensors[index], {}).items():
                if isinstance(value, torch.Tensor) and kind != "step":
                    yield f"optimizer/{kind}/{name}", name, local_part(value)

    def _replicated_tensors(self) -> dict[str, torch.Tensor]:
        """The rest of the state, which every rank has whole: copies on the CPU. Every rank calls it."""
        tensors = self.optimizer_tensors()
        own = self.module.state_dict(keep_vars=True)
        unoptimized = {name: self.read(name, own[name]) for name in self._unoptimized}
        replicated = self._under_all_names("model", unoptimized)
        if self.ema:
            averaged = zip(self._float_buffers(), self.ema.tensors[len(tensors) :], strict=True)
            unoptimized |= {name: _copied(value) for name, value in averaged}
            replicated |= self._under_all_names("ema", unoptimized)
        for name, index in self.param_positions():
            steps = self.optimizer.state.get(tensors[index], {}).get("step")
            if isinstance(steps, torch.Tensor):
                replicated[f"optimizer/step/{name}"] = _copied(steps)
        return replicated

    def _under_all_names(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors under the keys of a state: one with several names several times, in memory of its own."""
        return {f"{kind}/{each}": whole.clone() for name, whole in tensors.items() for each in self._names[name]}

    def _load_optimizer_state(self, name: str, tensor: torch.Tensor, kind: str, value: torch.Tensor) -> None:
        """One state tensor of a parameter into the optimizer's state of its optimizer tensor."""
        state = self.optimizer.state[tensor]
        if kind == "step":  # AdamW counts its steps on the CPU unless it is fused
            state[kind] = value.to(tensor.device if self.optimizer.defaults.get("fused") else "cpu", copy=True)
            return
        if kind not in state:
            state[kind] = torch.zeros_like(tensor)
        self.load_shard(name, value, local_part(state[kind]))

    def _load_ema(self, ema: Ema, state: State) -> None:
        """The state's EMA; where it has none, the average starts from the state's weights."""
        source = state.ema or state.model
        for name, index in self.param_positions():
            self.load_shard(name, source[name], ema.tensors[index])
        buffers = ema.tensors[len(self.optimizer_tensors()) :]
        for name, value in zip(self._float_buffers(), buffers, strict=True):
            value.copy_(source[name])
        ema.updates.fill_(state.scalars.get("ema_updates", 0))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)
