"""What PyTorch's own engines, DDP and FSDP2, have in common: the train step, and parameters as optimizer tensors."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn
from typing_extensions import override

from widemix.data.batches import Batch
from widemix.distributed.topology import Topology
from widemix.engine.contract import Engine, StepResult, block_of
from widemix.engine.state import State
from widemix.optim.build import build_optimizer
from widemix.optim.dtensor import gathered
from widemix.optim.section import OptimSection
from widemix.recipe.train import TrainSection

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
    def param_slots(self) -> Iterator[tuple[str, int]]:
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
