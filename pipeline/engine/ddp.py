"""PyTorch's DistributedDataParallel: fp32 weights, autocast for bf16 and fp16."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from pipeline.data.loader import Batch
from pipeline.distributed.topology import Topology
from pipeline.engine.contract import Engine, StepResult, share
from pipeline.engine.loss import DTYPES, autocast
from pipeline.optim.build import build_optimizer
from pipeline.recipe.optim import OptimSection
from pipeline.recipe.train import EngineSection, TrainSection


class DDPEngine(Engine):
    """See `contract.Engine`. The optimiser holds the parameters themselves."""

    def __init__(
        self, module: nn.Module, section: EngineSection, optim: OptimSection, train: TrainSection, topology: Topology
    ):
        self.parameters = dict(module.named_parameters())
        super().__init__(module, build_optimizer(optim, module), train, topology)
        self.clip = float("inf") if optim.clip_grad is None else optim.clip_grad
        self.dtype = DTYPES[train.precision]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=train.precision == "fp16")
        self.model = DistributedDataParallel(
            module,
            device_ids=[topology.device] if topology.device.type == "cuda" else None,
            forward_sync_buffers=False,  # permutations never change
            bucket_cap_mb=section.bucket_cap_mb,
            gradient_as_bucket_view=section.gradient_as_bucket_view,
            static_graph=section.static_graph,
            # It would sort its buckets anew after its first step, and with them the order of sums over three ranks or
            # more: a run that was started again would then differ from one that was not.
            find_unused_parameters=train.deterministic and topology.world > 2,
        )
        if section.bf16_compress:
            self.model.register_comm_hook(None, bf16_compress_hook)

    def train_step(self, batches: Sequence[Batch]) -> StepResult:
        if not self.module.training:  # after an evaluation; walking all modules each step takes a third of a ms
            self.model.train()
        loss = torch.zeros((), device=self.device)
        for i, batch in enumerate(batches):
            with self.model.no_sync() if i < len(batches) - 1 else nullcontext():
                with self.evaluate_mode():
                    logits = self.model(batch.inputs)
                part = self.loss(logits, batch.targets) / len(batches)
                self.scaler.scale(part).backward()
            loss += part.detach()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), self.clip)
        self.update(norm)
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm.detach())

    def update(self, norm: torch.Tensor) -> None:
        fused = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        if fused and not self.scaler.is_enabled():  # the device decides, nobody waits
            self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        else:
            super().update(norm)

    def evaluate_mode(self) -> torch.autocast:
        return autocast(self.device, self.dtype)

    def owners(self) -> list[torch.Tensor]:
        return list(self.parameters.values())

    def owned(self) -> Iterator[tuple[str, int]]:
        return ((name, index) for index, name in enumerate(self.parameters))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.parameters[name].shape)

    def gather(self, name: str, kept: torch.Tensor) -> torch.Tensor:
        return kept

    def part(self, name: str, kept: torch.Tensor) -> tuple[int, torch.Tensor]:
        return share(kept)

    def scatter(self, name: str, whole: torch.Tensor, kept: torch.Tensor) -> None:
        kept.copy_(whole)
