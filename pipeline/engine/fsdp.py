"""PyTorch's FSDP2 (`fully_shard`): weights, gradients and optimiser shared out over the ranks, block by block."""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from pipeline.data.loader import Batch
from pipeline.distributed.topology import Topology
from pipeline.engine.contract import Engine, StepResult
from pipeline.engine.loss import DTYPES, autocast
from pipeline.optim.build import build_optimizer
from pipeline.recipe.optim import OptimSection
from pipeline.recipe.train import EngineSection, TrainSection


class FSDPEngine(Engine):
    """See `contract.Engine`. Weights stay in fp32 shards; each block is gathered and computed in bf16 or fp16.

    The optimiser holds the parameters, each of which is a DTensor of its shards.
    """

    def __init__(
        self, module: nn.Module, section: EngineSection, optim: OptimSection, train: TrainSection, topology: Topology
    ):
        mesh = init_device_mesh(topology.device.type, (topology.world,))
        half = DTYPES[train.precision] if train.precision != "fp32" else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        pinned = topology.device.type == "cuda"
        place = CPUOffloadPolicy(pin_memory=pinned) if section.cpu_offload else OffloadPolicy()
        for block in getattr(module, "blocks", ()):
            fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=place)
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=place)
        # While the root's weights are gathered, as after a forward, the module names those instead.
        self.shards = {name: cast(DTensor, p) for name, p in module.named_parameters()}
        super().__init__(module, build_optimizer(optim, module), train, topology)
        self.clip = float("inf") if optim.clip_grad is None else optim.clip_grad
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=train.precision == "fp16")

    def train_step(self, batches: Sequence[Batch]) -> StepResult:
        if not self.module.training:
            self.module.train()
        loss = torch.zeros((), device=self.device)
        for i, batch in enumerate(batches):
            cast(FSDPModule, self.module).set_requires_gradient_sync(i == len(batches) - 1)
            part = self.loss(self.module(batch.inputs), batch.targets) / len(batches)
            self.scaler.scale(part).backward()
            loss += part.detach()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.shards.values(), self.clip)
        assert isinstance(norm, DTensor)
        whole_norm = norm.full_tensor().to(self.device)
        self.update(whole_norm)
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, whole_norm)

    def evaluate_mode(self) -> torch.autocast:
        return autocast(self.device, torch.float32)  # the blocks know their precision

    def owners(self) -> list[torch.Tensor]:
        return list(self.shards.values())

    def owned(self) -> Iterator[tuple[str, int]]:
        return ((name, index) for index, name in enumerate(self.shards))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.shards[name].shape)

    def gather(self, name: str, kept: torch.Tensor) -> torch.Tensor:
        like = self.shards[name]
        here = kept.to(like.device)
        layout = (like.device_mesh, like.placements)
        return DTensor.from_local(here, *layout, shape=like.shape, stride=like.stride()).full_tensor()

    def part(self, name: str, kept: torch.Tensor) -> tuple[int, torch.Tensor]:
        like = self.shards[name]  # shared out by rows, as torch.chunk does
        rows = -(-like.shape[0] // like.device_mesh.size())
        first = min(rows * like.device_mesh.get_local_rank(), like.shape[0])
        return first * (like.numel() // like.shape[0]), kept.reshape(-1)

    def scatter(self, name: str, whole: torch.Tensor, kept: torch.Tensor) -> None:
        like = self.shards[name]
        mine = distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
        kept.copy_(mine.to_local())

    def publish(self) -> None:
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # what is still gathered would keep the weights from before
