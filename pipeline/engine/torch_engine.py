"""The common part of DDP and FSDP2, the train step and parameters as optimizer tensors, and the engine with DDP."""

import inspect
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from widemix.data.batches import Batch
from widemix.data.precision import DTYPES, autocast
from widemix.distributed.topology import Topology
from widemix.engine.interface import Engine, StepResult, block_of
from widemix.engine.state import State
from widemix.optim.build import build_optimizer
from widemix.optim.dtensor import gathered
from widemix.optim.section import OptimSection
from widemix.recipe.sections import EngineSection, TrainSection

# GradScaler's loss scale, and the steps since it last changed: the names in our states, and those in its state_dict.
_SCALER = {"loss_scale": "scale", "loss_scale_steps": "_growth_tracker"}


class TorchEngine(Engine):
    """An engine whose optimizer tensors are the module's parameters, whole or as DTensors, and whose fp16 is torch's.

    A subclass calls the constructor when the parameters are as the optimizer is to have them, and sets `model` where
    the forward pass is not called on the module itself.
    """

    def __init__(self, module: nn.Module, optim: OptimSection, train: TrainSection, topology: Topology):
        # Kept because FSDP's module has other tensors under these names while its weights are gathered.
        self.parameters = dict(module.named_parameters())
        super().__init__(module, build_optimizer(optim, module), optim, train, topology)
        self.model = module
        self.clip = optim.clip_grad
        self.skips_on_device = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=train.precision == "fp16")
        # Its scale stays where it is first used: beside the gradients. torch copies it elsewhere without waiting, and
        # on the host, where offloaded weights have theirs, a copy would be read before it has arrived.
        self.scaler.scale(torch.zeros((), dtype=torch.float32, device=next(iter(self.parameters.values())).device))

    @abstractmethod
    def accumulate(self, last: bool) -> AbstractContextManager:
        """A context for forward and backward of a micro-batch: gradients are reduced over ranks in the last one."""

    @override
    def train_step(self, batches: Sequence[Batch]) -> StepResult:
        if not self.module.training:  # after an evaluation; walking all modules each step takes a third of a ms
            self.model.train()
        loss = torch.zeros((), dtype=torch.float32, device=self.device)
        for number, batch in enumerate(batches):
            self.set_sample_keys(batch)
            with self.accumulate(last=number == len(batches) - 1):
                with self.evaluate_mode():
                    logits = self.model(batch.inputs)
                part = self.loss(logits, batch.targets) / len(batches)
                with self.backward_pass():
                    self.scaler.scale(part).backward()
            loss += part.detach()
        self.check_used([name for name, p in self.parameters.items() if p.requires_grad and p.grad is None])
        self.scaler.unscale_(self.optimizer)
        block_norms = self.block_norms() if self.wants_block_norms else None
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None])
        if self.clip is not None:
            nn.utils.clip_grads_with_norm_(self.parameters.values(), self.clip, norm)
        norm = gathered(norm)
        self.update(norm)
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm.detach().to(self.device), block_norms)

    def block_norms(self) -> torch.Tensor:
        """The L2 norms of the gradients of `blocks()`, over all ranks, on the device: [blocks]."""
        gradients: dict[str, list[torch.Tensor]] = {name: [] for name in self.blocks()}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                gradients[block_of(name)].append(parameter.grad)
        norms = [nn.utils.get_total_norm(own) for own in gradients.values()]
        return torch.stack([gathered(norm).to(self.device) for norm in norms])  # of no gradient: a zero on the CPU

    def update(self, norm: torch.Tensor) -> None:
        """The optimizer's step, unless the gradient's norm is not finite: then nothing but fp16's scale changes."""
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.skips_on_device:  # its kernel skips the step; the host does not wait for the norm
            self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif norm.isfinite():
            self.optimizer.step()

    @override
    def optimizer_tensors(self) -> list[torch.Tensor]:
        return list(self.parameters.values())

    @override
    def param_positions(self) -> Iterator[tuple[str, int]]:
        return ((name, index) for index, name in enumerate(self.parameters))

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.parameters[name].shape)

    @override
    def scalars(self) -> dict[str, float]:
        scalars = super().scalars()
        if self.scaler.is_enabled():
            scalars |= {name: float(self.scaler.state_dict()[theirs]) for name, theirs in _SCALER.items()}
        return scalars

    @override
    def load(self, state: State) -> None:
        super().load(state)
        if self.scaler.is_enabled() and state.scalars.keys() >= _SCALER.keys():
            known = {theirs: state.scalars[name] for name, theirs in _SCALER.items()}
            self.scaler.load_state_dict(self.scaler.state_dict() | known)


_DEFAULT_BUCKET_MB = EngineSection.model_fields["bucket_cap_mb"].default


class DDPEngine(TorchEngine):
    """See `interface.Engine`. Every rank has every parameter; the optimizer tensors are the parameters themselves."""

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


def without_buffer_sync() -> dict[str, Any]:
    """The argument of DDP by which buffers are not broadcast before each forward pass."""
    named = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in named else "broadcast_buffers": False}
