"""DeepSpeed with ZeRO 0, 1 and 2. Its own scheduler, loader and checkpoints stay unused.

DeepSpeed is imported where it is used: importing it takes seconds, and a DDP run needs none of it.
"""

import logging
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeline.data.loader import Batch
from pipeline.engine.contract import (
    LOSSES,
    State,
    StepResult,
    autocast,
    by_parameter,
    read_model,
    read_optimizer,
    write_optimizer,
)
from pipeline.recipe.optim import OptimSection
from pipeline.recipe.train import EngineSection, TrainSection
from pipeline.topology import Topology


def deepspeed_config(
    engine: EngineSection, optim: OptimSection, train: TrainSection, topology: Topology
) -> dict[str, Any]:
    """DeepSpeed's JSON as the recipe implies it."""
    return {
        "train_batch_size": train.global_batch,
        "train_micro_batch_size_per_gpu": train.global_batch // topology.world // train.accumulation,
        "gradient_accumulation_steps": train.accumulation,
        "gradient_clipping": optim.clip_grad or 0.0,
        "zero_optimization": {"stage": engine.zero_stage},
        "zero_allow_untested_optimizer": True,  # torch's own AdamW and SGD
        "bf16": {"enabled": train.precision == "bf16"},
        "fp16": {"enabled": train.precision == "fp16"},
        "steps_per_print": 1 << 62,
    }


class DeepSpeedEngine:
    """See `contract.Engine`."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        section: EngineSection,
        optim: OptimSection,
        train: TrainSection,
        topology: Topology,
    ):
        self.module = module
        self.optimizer = optimizer
        self.device = topology.device
        self.loss = LOSSES[train.loss]
        self.whole = section.zero_stage == 0  # the optimiser holds the parameters themselves, nothing is shared out
        self.engine, *_ = _import_deepspeed(topology).initialize(
            model=module,
            optimizer=optimizer,
            config=deepspeed_config(section, optim, train, topology),
            dist_init_required=False,
        )
        self.dtype = next(module.parameters()).dtype

    def step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.engine.train()
        loss = torch.zeros((), device=self.device)
        norm = None
        for batch in batches:
            inputs = batch.inputs.to(self.dtype) if batch.inputs.is_floating_point() else batch.inputs
            part = self.loss(self.engine(inputs), batch.targets)
            self.engine.backward(part)  # divides by the accumulation, and averages over ranks when it is complete
            if self.whole:  # where DeepSpeed measures no norm of its own
                norm = nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
            self.engine.step()
            loss += part.detach() / len(batches)
        if norm is None:
            norm = torch.as_tensor(self.engine.get_global_grad_norm(), device=self.device)
        return StepResult(loss, norm)

    def evaluate_mode(self) -> torch.autocast:
        return autocast(self.device, self.dtype)

    def state(self) -> State:
        model = read_model(self.module)
        if self.whole:
            return State(model, read_optimizer(self.module, self.optimizer))
        slots: dict[str, torch.Tensor] = {}
        kept = self.optimizer.state[self._slice(0)]
        for name, parameter in self.module.named_parameters():
            model[name] = self._gather(parameter)
            for slot in kept:
                whole = kept[slot].cpu().clone() if slot == "step" else self._gather(parameter, slot)
                slots[f"{slot}/{name}"] = whole
        scalars = {"loss_scale": float(self.engine.optimizer.loss_scale)} if self.dtype is torch.float16 else {}
        return State(model, slots, scalars)

    def load(self, state: State) -> None:
        self.module.load_state_dict(state.model)  # rounded to the precision of training
        if self.whole:
            write_optimizer(state.optimizer, self.module, self.optimizer)
            return
        for name, parameter in self.module.named_parameters():
            self._scatter(parameter, state.model[name])
        for name, kept in by_parameter(state.optimizer).items():
            for slot, value in kept.items():
                if slot == "step":
                    self._set_step(value)
                else:
                    self._scatter(self.module.get_parameter(name), value, slot)
        if "loss_scale" in state.scalars and self.dtype is torch.float16:
            self.engine.optimizer.loss_scaler.cur_scale = state.scalars["loss_scale"]

    # ZeRO 1 and 2 give each rank a flat fp32 slice of every parameter group. `_hp_mapping` says which part of a
    # parameter lies where in this rank's slice; it is None where the slice holds none of it. DeepSpeed's own
    # safe_get_full_optimizer_state finds only the first of several groups (0.19.8), hence the few lines here.

    def _slice(self, group: int) -> torch.Tensor:
        return self.optimizer.param_groups[group]["params"][0]

    def _fragments(
        self, parameter: nn.Parameter, whole: torch.Tensor, slot: str | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """This rank's part of flat `whole`, and where it keeps that part, among weights or in a slot: two views."""
        mapping: Any = vars(parameter)["_hp_mapping"]
        if mapping is None:
            return None
        kept = self._slice(mapping.param_group_index)
        if slot is not None:
            kept = self.optimizer.state[kept].setdefault(slot, torch.zeros_like(kept))
        mine, place = mapping.lp_fragment_address, mapping.hp_fragment_address
        return whole[mine.start :][: mine.numel], kept.detach()[place.start :][: place.numel]

    def _gather(self, parameter: nn.Parameter, slot: str | None = None) -> torch.Tensor:
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=self.device)
        fragments = self._fragments(parameter, whole, slot)
        if fragments is not None:
            fragments[0].copy_(fragments[1])
        dist.all_reduce(whole)
        return whole.reshape(parameter.shape).cpu()

    def _scatter(self, parameter: nn.Parameter, whole: torch.Tensor, slot: str | None = None) -> None:
        fragments = self._fragments(parameter, whole.flatten(), slot)
        if fragments is not None:
            fragments[1].copy_(fragments[0])

    def _set_step(self, step: torch.Tensor) -> None:
        device = self.device if self.optimizer.defaults.get("fused") else "cpu"
        for group in range(len(self.optimizer.param_groups)):
            self.optimizer.state[self._slice(group)]["step"] = step.to(device, copy=True)


def _import_deepspeed(topology: Topology) -> Any:
    """DeepSpeed, without its minute-long compilations: torch's optimisers and collectives do the work here."""
    os.environ.setdefault("LOCAL_RANK", str(topology.local_rank))  # it insists
    os.environ.setdefault("DS_ACCELERATOR", topology.device.type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own deprecations are not the user's
        import deepspeed
        import deepspeed.ops
        from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
