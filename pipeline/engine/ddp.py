"""PyTorch's DistributedDataParallel: fp32 weights, autocast for bf16 and fp16."""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.data.loader import Batch
from pipeline.engine.contract import (
    DTYPES,
    LOSSES,
    State,
    StepResult,
    autocast,
    read_model,
    read_optimizer,
    write_optimizer,
)
from pipeline.recipe.optim import OptimSection
from pipeline.recipe.train import TrainSection
from pipeline.topology import Topology


class DDPEngine:
    """See `contract.Engine`."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        optim: OptimSection,
        train: TrainSection,
        topology: Topology,
    ):
        self.module = module
        self.optimizer = optimizer
        self.clip = float("inf") if optim.clip_grad is None else optim.clip_grad
        self.device = topology.device
        self.loss = LOSSES[train.loss]
        self.dtype = DTYPES[train.precision]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=train.precision == "fp16")
        self.model = DistributedDataParallel(
            module,
            device_ids=[topology.device] if topology.device.type == "cuda" else None,
            forward_sync_buffers=False,  # permutations never change
            gradient_as_bucket_view=True,
        )

    def step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.model.train()
        loss = torch.zeros((), device=self.device)
        for i, batch in enumerate(batches):
            with ExitStack() as stack:
                if i < len(batches) - 1:
                    stack.enter_context(self.model.no_sync())
                with self.evaluate_mode():
                    logits = self.model(batch.inputs)
                part = self.loss(logits, batch.targets) / len(batches)
                self.scaler.scale(part).backward()
            loss += part.detach()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm.detach())

    def evaluate_mode(self) -> torch.autocast:
        return autocast(self.device, self.dtype)

    def state(self) -> State:
        scalars = {"loss_scale": self.scaler.get_scale()} if self.scaler.is_enabled() else {}
        return State(read_model(self.module), read_optimizer(self.module, self.optimizer), scalars)

    def load(self, state: State) -> None:
        self.module.load_state_dict(state.model)
        write_optimizer(state.optimizer, self.module, self.optimizer)
        if self.scaler.is_enabled() and "loss_scale" in state.scalars:
            self.scaler.load_state_dict(self.scaler.state_dict() | {"scale": state.scalars["loss_scale"]})
