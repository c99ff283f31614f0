"""DeepSpeed with ZeRO 0 to 3. DeepSpeed's own scheduler, loader and checkpoints are not used.

DeepSpeed is imported where it is used: importing it takes seconds, and a DDP run needs none of it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from widemix.data.batches import Batch
from widemix.data.precision import DTYPES, autocast
from widemix.distributed.topology import Topology
from widemix.engine.deepspeed_config import deepspeed_config, import_deepspeed
from widemix.engine.interface import Engine, StepResult, set_timeout
from widemix.engine.layout import adapt_network
from widemix.engine.state import State
from widemix.errors import InputError
from widemix.optim.build import build_optimizer
from widemix.optim.section import OptimSection
from widemix.recipe.sections import EngineSection, TrainSection


@dataclass(frozen=True)
class Slice:
    """Where this rank's slice of a flattened parameter lies."""

    index: int  # of the optimizer tensor
    place: slice  # in the optimizer tensor
    values: slice  # of the flattened parameter


class DeepSpeedEngine(Engine):
    """See `interface.Engine`. With ZeRO 1 to 3 an optimizer tensor holds slices of many parameters."""

    def __init__(
        self, module: nn.Module, section: EngineSection, optim: OptimSection, train: TrainSection, topology: Topology
    ):
        self.stage = section.zero_stage
        self.replica = (topology.rank, topology.world) if self.stage == 0 else (0, 1)
        self.config = deepspeed_config(section, optim, train, topology)
        self.shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        adapt_network(module, DTYPES[train.precision])
        optimizer = build_optimizer(optim, module)
        # As torch's Adagrad, which DeepSpeed builds anew without our groups. Others have empty entries.
        if self.stage and any(optimizer.state.values()):
            raise InputError(
                f"optim.name {optim.name} makes its state when it is built, before ZeRO has cut the parameters into "
                "slices; take engine.kind ddp or fsdp"
            )
        groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.parameters = dict(module.named_parameters())
        self.groups = {name: groups[id(p)] for name, p in self.parameters.items() if id(p) in groups}
        # DeepSpeed rounds the weights to half precision, and makes fp32 copies of what is left and not frozen.
        originals = {} if train.precision == "fp32" else {name: _on_cpu(p) for name, p in self.parameters.items()}
        self._frozen = {name: originals.pop(name) for name in list(originals) if name not in self.groups}
        self.engine, *_ = import_deepspeed(topology).initialize(
            model=module, optimizer=optimizer, config=dict(self.config), dist_init_required=False
        )
        # DeepSpeed makes a process group of its own, with torch's default timeout.
        set_timeout(section.timeout_s, self.engine.data_parallel_group)
        self.zero: Any = self.engine.optimizer
        self.slices = {name: self._slice(name) for name in self.groups} if self.stage else {}
        self.dtype = next(module.parameters()).dtype
        if scaler := self._scaler():
            scaler.raise_error_at_min_scale = False  # the training loop counts failed steps, and rolls back
        self.norm = torch.zeros((), dtype=torch.float32, device=topology.device)  # of the last gradient
        self.used: set[str] = set()  # parameters that got a gradient in this step
        for name in self.groups:  # DeepSpeed takes zeros for the gradients of others
            self.parameters[name].register_post_accumulate_grad_hook(lambda _, name=name: self.used.add(name))
        if self.stage == 0:  # stages 1 to 3 skip such a step themselves
            optimizer.step = partial(self._step_if_finite, optimizer.step)  # type: ignore[assignment]
        super().__init__(module, optimizer, optim, train, topology)
        self._restore(originals)

    def _step_if_finite(self, step: Callable[[], Any]) -> None:
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):  # its kernel skips the step
            self.optimizer.found_inf = (~self.norm.isfinite()).float()  # type: ignore[attr-defined]
            step()
        elif self.norm.isfinite():
            step()

    @torch.no_grad()
    def _restore(self, originals: Mapping[str, torch.Tensor]) -> None:
        """Set the fp32 weights to what they were before DeepSpeed rounded them; the EMA starts from them too."""
        if not originals:
            return
        masters = self._masters()
        for name, index in self.param_positions():
            self.load_shard(name, originals[name], masters[index])
            if self.ema:
                self.load_shard(name, originals[name], self.ema.tensors[index])
        self.sync_module()

    @override
    def train_step(self, batches: Sequence[Batch]) -> StepResult:
        """Forward, backward, clip and update by DeepSpeed; see `Engine.train_step`."""
        if not self.module.training:
            self.engine.train()
        loss = torch.zeros((), dtype=torch.float32, device=self.device)
        self.used.clear()
        for number, batch in enumerate(batches):
            inputs = batch.inputs.to(self.dtype) if batch.inputs.is_floating_point() else batch.inputs
            self.set_sample_keys(batch)
            part = self.loss(self.engine(inputs), batch.targets)
            with self.backward_pass():
                self.engine.backward(part)  # divides by the accumulation steps, averages over ranks in the last
            if number == len(batches) - 1:
                self.check_used([name for name in self.groups if name not in self.used])
            if self.stage == 0:  # where DeepSpeed measures no norm of its own
                self.norm = nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
            self.engine.step()
            loss += part.detach() / len(batches)
        if self.stage > 0:
            self.norm = torch.as_tensor(self.engine.get_global_grad_norm(), device=self.device)
        return StepResult(loss, self.norm)

    @override
    def evaluate_mode(self) -> torch.autocast:
        """Return the autocast context of the parameters' dtype."""
        return autocast(self.device, self.dtype)

    @override
    def optimizer_tensors(self) -> list[torch.Tensor]:
        """Return the parameters with ZeRO 0, else the flat fp32 partitions of this rank, one a parameter group."""
        if self.stage == 0:
            return [self.parameters[name] for name in self.groups]
        if self.stage == 3:
            return list(self.zero.fp32_partitioned_groups_flat)
        return [group["params"][0] for group in self.optimizer.param_groups]

    @override
    def param_positions(self) -> Iterator[tuple[str, int]]:
        """Return each trained parameter and its optimizer tensor; several lie in one with ZeRO 1 to 3."""
        if self.stage == 0:
            return ((name, index) for index, name in enumerate(self.groups))
        return ((name, mine.index) for name, mine in self.slices.items())

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that the parameter had before DeepSpeed flattened it."""
        return tuple(self.shapes[name])

    @override
    def full_tensor(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Sum the slices of all ranks, each among zeros: float32, of `shape(name)`, on the device."""
        if self.stage == 0:
            return local.view(self.shapes[name])
        mine = self.slices[name]
        whole = torch.zeros(self.shapes[name], dtype=torch.float32, device=self.device)
        whole.view(-1)[mine.values] = local[mine.place].to(self.device)
        dist.all_reduce(whole)
        return whole

    @override
    def local_slice(self, name: str, local: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Return where this rank's slice begins in the flattened parameter, and the slice, a view [n] of `local`."""
        if self.stage == 0:
            return 0, local.view(-1)
        mine = self.slices[name]
        return mine.values.start, local[mine.place]

    @override
    def sync_module(self) -> None:
        """Copy the fp32 partitions to the weights of the module; stage 3 gathers small ones anew."""
        if self.stage in (1, 2):
            self.zero.update_lp_params()
        if self.stage == 3:
            self.zero.empty_partition_cache()  # weights that are still gathered are those from before
            for number in range(len(self.zero.fp32_partitioned_groups_flat)):
                self.zero._reassign_or_swap_out_partitioned_parameters(number)
            if self.zero.persistent_parameters:
                self.zero.persistent_parameters[0].all_gather(self.zero.persistent_parameters)

    @override
    def read(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """Return a CPU copy; of a frozen parameter in fp32 as it was given, whatever DeepSpeed has rounded it to."""
        if name in self._frozen:
            return self._frozen[name].clone()
        with self._gathered(name):
            value = super().read(name, own)
        return value.view(self.shapes.get(name, value.shape))

    @override
    def write(self, name: str, own: torch.Tensor, value: torch.Tensor) -> None:
        if name in self._frozen:
            self._frozen[name].copy_(value.view_as(self._frozen[name]))
        with self._gathered(name):
            super().write(name, own, value)

    @override
    def scalars(self) -> dict[str, float]:
        scalars, scaler = super().scalars(), self._scaler()
        if scaler is None:
            return scalars
        steps = scaler.cur_iter - scaler.last_overflow_iter - 1  # without an overflow
        steps = (steps - 1) % scaler.scale_window + 1 if steps else 0  # the scale grows at multiples of the window
        scale = {"loss_scale": float(scaler.cur_scale), "loss_scale_steps": float(steps)}
        return scalars | scale | {"loss_scale_hysteresis": float(scaler.cur_hysteresis)}

    @override
    def load(self, state: State) -> None:
        super().load(state)
        scaler = self._scaler()
        if scaler is not None and "loss_scale" in state.scalars:
            scaler.cur_scale = state.scalars["loss_scale"]
            steps = int(state.scalars.get("loss_scale_steps", 0))
            scaler.last_overflow_iter = scaler.cur_iter - 1 - steps
            scaler.cur_hysteresis = int(state.scalars.get("loss_scale_hysteresis", scaler.delayed_shift))

    def _scaler(self) -> Any:
        """Return what adapts the loss scale of fp16; None where nothing does."""
        scaler = getattr(self.zero, "loss_scaler", None) if self.dtype is torch.float16 else None
        return scaler if getattr(scaler, "dynamic", False) else None

    def _gathered(self, name: str) -> AbstractContextManager:
        """A context in which a frozen parameter is whole: stage 3 shards it, and no optimizer tensor has it."""
        if self.stage < 3 or name not in self.parameters:
            return nullcontext()
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        return GatheredParameters([self.parameters[name]], modifier_rank=0)

    def _slice(self, name: str) -> Slice:
        """Where DeepSpeed has put this rank's slice of a parameter.

        DeepSpeed's safe_get_full_optimizer_state finds only the first of several groups at stages 1 and 2 (0.19.8),
        and its universal checkpoints give all groups of stage 3 the settings of the first: hence these few lines.
        """
        parameter: Any = self.parameters[name]
        if self.stage == 3:
            index, start, size = self.zero.grad_position[self.zero.get_param_id(parameter)]
            first = min(size * dist.get_rank(), self.shapes[name].numel())
            last = min(first + size, self.shapes[name].numel())  # the last rank's slice may be padded
            return Slice(index, slice(start, start + last - first), slice(first, last))
        mapping = parameter._hp_mapping
        if mapping is None:  # nothing of it is on this rank; its group is known all the same
            return Slice(self.groups[name], slice(0, 0), slice(0, 0))
        mine, place = mapping.lp_fragment_address, mapping.hp_fragment_address
        return Slice(
            mapping.param_group_index,
            slice(place.start, place.start + place.numel),
            slice(mine.start, mine.start + mine.numel),
        )


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)
