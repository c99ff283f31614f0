"""PyTorch's DistributedDataParallel: fp32 weights, autocast for bf16 and fp16."""

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from widemix.data.precision import DTYPES, autocast
from widemix.distributed.topology import Topology
from widemix.engine.torch_engine import TorchEngine
from widemix.engine.torch_versions import without_buffer_sync
from widemix.optim.section import OptimSection
from widemix.recipe.engine import EngineSection
from widemix.recipe.train import TrainSection

_DEFAULT_BUCKET_MB = EngineSection.model_fields["bucket_cap_mb"].default


class DDPEngine(TorchEngine):
    """See `contract.Engine`. Every rank has every parameter; the optimizer tensors are the parameters themselves."""

    model: DistributedDataParallel

    def __init__(
        self, module: nn.Module, section: EngineSection, optim: OptimSection, train: TrainSection, topology: Topology
    ):
        super().__init__(module, optim, train, topology)
        self.replica = topology.rank, topology.world
        self.dtype = DTYPES[train.precision]
        # Of gradients of convolutions on CPUs, along dimensions of size 1 alone, where a stride means nothing.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        self.model = DistributedDataParallel(
            module,
            device_ids=[topology.device] if topology.device.type == "cuda" else None,
            **without_buffer_sync(),  # permutations never change
            # Only with torch's default is the first bucket of 1 MB, so that communication starts early.
            bucket_cap_mb=None if section.bucket_cap_mb == _DEFAULT_BUCKET_MB else section.bucket_cap_mb,
            gradient_as_bucket_view=section.gradient_as_bucket_view,
            static_graph=section.static_graph,
            # Without it DDP sorts its buckets anew after its first step, which changes the order of sums over three
            # ranks or more: a resumed run would then differ in the last bits from one that was not interrupted.
            find_unused_parameters=train.deterministic and topology.world > 2,
        )
        if section.reduce_dtype == "bf16":
            self.model.register_comm_hook(None, bf16_compress_hook)

    @override
    def accumulate(self, last: bool) -> AbstractContextManager:
        return nullcontext() if last else self.model.no_sync()

    @override
    def evaluate_mode(self) -> torch.autocast:
        return autocast(self.device, self.dtype)

    @override
    def full_tensor(self, name: str, local: torch.Tensor) -> torch.Tensor:
        return local

    @override
    def local_slice(self, name: str, local: torch.Tensor) -> tuple[int, torch.Tensor]:
        return 0, local.reshape(-1)  # a copy where the parameter is not contiguous, as with channels_last

    @override
    def load_shard(self, name: str, whole: torch.Tensor, local: torch.Tensor) -> None:
        local.copy_(whole.reshape(local.shape))
