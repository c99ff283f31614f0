"""PyTorch's FSDP2 (`fully_shard`): weights, gradients and optimizer state sharded over the ranks, block by block."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from textwrap import shorten
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from typing_extensions import override

from widemix.data.precision import DTYPES, autocast
from widemix.distributed.topology import Topology
from widemix.engine.interface import set_timeout
from widemix.engine.layout import adapt_network, separable_blocks
from widemix.engine.torch_engine import TorchEngine
from widemix.errors import InputError
from widemix.optim.section import OptimSection
from widemix.recipe.sections import EngineSection, TrainSection


class FSDPEngine(TorchEngine):
    """See `interface.Engine`. Weights stay in fp32 shards; each block is gathered and computed in bf16 or fp16.

    The optimizer tensors are the parameters, each a DTensor of which every rank has some rows. The first weights are
    rank 0's; unless they are offloaded to the CPU, the other ranks' module may be on the meta device.
    """

    def __init__(
        self, module: nn.Module, section: EngineSection, optim: OptimSection, train: TrainSection, topology: Topology
    ):
        nodes = topology.world // topology.local_world if section.sharding == "hybrid" else 1
        mesh = (
            _hybrid_mesh(section, topology)
            if nodes > 1
            else init_device_mesh(topology.device.type, (topology.world,))
        )
        self.replica = topology.rank // mesh.size(-1), nodes
        half = DTYPES[train.precision] if train.precision != "fp32" else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=DTYPES[section.reduce_dtype])
        pinned = topology.device.type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=pinned) if section.cpu_offload else OffloadPolicy()
        self.shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        adapt_network(module, DTYPES[train.precision])
        whole = dict(module.named_parameters())  # until they are sharded
        for part in (*separable_blocks(module), module):
            sharded = fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload)
            if topology.device.type == "cpu":  # torch 2.8's gloo adds where it is asked for the mean
                sharded.set_force_sum_reduction_for_comms(True)
        _try_optimizer(optim, mesh)
        if not section.cpu_offload:
            _hand_out(module, whole, topology)
        super().__init__(module, optim, train, topology)

    @override
    def accumulate(self, last: bool) -> AbstractContextManager:
        cast(FSDPModule, self.module).set_requires_gradient_sync(last)
        return nullcontext()

    @override
    def evaluate_mode(self) -> torch.autocast:
        return autocast(self.device, torch.float32)  # MixedPrecisionPolicy casts

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.shapes[name])

    @override
    def full_tensor(self, name: str, local: torch.Tensor) -> torch.Tensor:
        like = self._parameter(name)
        layout = (like.device_mesh, like.placements)
        on_device = local.to(like.device)
        whole = DTensor.from_local(on_device, *layout, shape=like.shape, stride=like.stride()).full_tensor()
        return whole.view(self.shape(name))

    @override
    def local_slice(self, name: str, local: torch.Tensor) -> tuple[int, torch.Tensor]:
        like = self._parameter(name)  # sharded by rows, as torch.chunk does
        rows = -(-like.shape[0] // like.device_mesh.size(-1))
        first = min(rows * like.device_mesh.get_local_rank(-1), like.shape[0])
        return first * (like.numel() // like.shape[0]), local.view(-1)

    @override
    def sync_module(self) -> None:
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # weights that are still gathered are those from before

    def _parameter(self, name: str) -> DTensor:
        return cast(DTensor, self.parameters[name])


def _try_optimizer(optim: OptimSection, mesh: DeviceMesh) -> None:
    """Take two steps of an optimizer on a small sharded parameter; `InputError` if it can't."""
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    weight = nn.Parameter(
        distribute_tensor(torch.ones(8, 8, dtype=torch.float32, device=mesh.device_type), mesh, placements)
    )
    group = {"params": [weight], optim.spec.penalty: 0.1, "lr_scale": 1.0, "matrices": False}
    try:
        optimizer = optim.spec.build([group], optim)
        for _ in range(2):
            weight.grad = torch.full_like(weight, 0.5)
            optimizer.step()
    except (RuntimeError, NotImplementedError, AssertionError) as error:  # the last one by torch 2.8
        reason = shorten(str(error).partition(". ")[0], 150, placeholder=" ...")
        raise InputError(
            f"optim.name {optim.name}: its step fails on the shards of engine.kind fsdp ({reason}); take engine.kind "
            "ddp"
        ) from None


@torch.no_grad()
def _hand_out(module: nn.Module, whole: Mapping[str, torch.Tensor], topology: Topology) -> None:
    """Give all ranks their shards of rank 0's whole parameters, and its buffers; others may be on the meta device."""
    if any(tensor.is_meta for tensor in whole.values()):
        module.to_empty(device=topology.device)
    for name, parameter in module.named_parameters():
        mine = cast(DTensor, parameter)
        full = whole[name] if topology.is_main else torch.empty(mine.shape, dtype=mine.dtype, device=topology.device)
        mine.copy_(distribute_tensor(full.detach(), mine.device_mesh, mine.placements))
    for buffer in module.buffers():
        dist.broadcast(buffer, 0)


def _hybrid_mesh(section: EngineSection, topology: Topology) -> DeviceMesh:
    """A mesh over whose first dimension, the nodes, FSDP has replicas, and over whose second it shards."""
    shape = (topology.world // topology.local_world, topology.local_world)
    mesh = init_device_mesh(topology.device.type, shape, mesh_dim_names=("replicate", "shard"))
    for group in mesh.get_all_groups():  # they have torch's default timeout
        set_timeout(section.timeout_s, group)
    return mesh
