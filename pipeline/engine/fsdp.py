"""PyTorch's FSDP2 (`fully_shard`): weights, gradients and optimiser shared out over the ranks, block by block."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pipeline.data.loader import Batch
from pipeline.engine.contract import DTYPES, LOSSES, State, StepResult, autocast, by_parameter
from pipeline.optim import build_optimizer
from pipeline.recipe.optim import OptimSection
from pipeline.recipe.train import TrainSection
from pipeline.topology import Topology

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class FSDPEngine:
    """See `contract.Engine`. Weights stay in fp32 shards; in bf16 each block is gathered and computed in bf16."""

    def __init__(self, module: nn.Module, optim: OptimSection, train: TrainSection, topology: Topology):
        mesh = init_device_mesh(topology.device.type, (topology.world,))
        half = DTYPES[train.precision] if train.precision != "fp32" else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        for block in getattr(module, "blocks", ()):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        self.module = module
        self.optimizer = build_optimizer(optim, module)  # of the shards, so not before
        self.clip = float("inf") if optim.clip_grad is None else optim.clip_grad
        self.device = topology.device
        self.loss = LOSSES[train.loss]

    def step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.module.train()
        loss = torch.zeros((), device=self.device)
        for i, batch in enumerate(batches):
            cast(FSDPModule, self.module).set_requires_gradient_sync(i == len(batches) - 1)
            part = self.loss(self.module(batch.inputs), batch.targets) / len(batches)
            part.backward()
            loss += part.detach()
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        assert isinstance(norm, DTensor)
        return StepResult(loss, norm.full_tensor())

    def evaluate_mode(self) -> torch.autocast:
        return autocast(self.device, torch.float32)  # the blocks know their precision

    def state(self) -> State:
        model: Any = get_model_state_dict(self.module, options=WHOLE)
        optimizer: Any = get_optimizer_state_dict(self.module, self.optimizer, options=WHOLE)
        kept = optimizer.get("state", {})  # on rank 0
        return State(model, {f"{slot}/{name}": value for name in kept for slot, value in kept[name].items()})

    def load(self, state: State) -> None:
        model: Any = state.model
        sharded: Any = get_optimizer_state_dict(self.module, self.optimizer)
        whole: Any = {"state": by_parameter(state.optimizer), "param_groups": sharded["param_groups"]}
        set_model_state_dict(self.module, model, options=WHOLE)
        set_optimizer_state_dict(self.module, self.optimizer, whole, options=WHOLE)
