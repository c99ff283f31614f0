"""The interface of an engine to the training loop."""

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from widemix.data.batches import Batch
from widemix.distributed.topology import Topology
from widemix.engine.batch_norm import ForwardBuffers, average_over_ranks, changed
from widemix.engine.sharded_model import ShardedModel
from widemix.errors import InputError
from widemix.models.drop_path import DropPath, set_drop_path_keys
from widemix.optim.build import set_rate
from widemix.optim.section import OptimSection
from widemix.recipe.losses import LOSSES
from widemix.recipe.sections import TrainSection


@dataclass(frozen=True)
class StepResult:
    """Metrics of one optimizer step, scalars on the device.

    A metric is read only when it is logged, so that a step never waits for the device.
    """

    loss: torch.Tensor  # mean over the samples of this rank
    grad_norm: torch.Tensor  # over all ranks, before clipping
    block_norms: torch.Tensor | None = None  # [blocks]: the same of each of `Engine.blocks()`, if it was asked for


class Engine(ShardedModel):
    """A network and its optimizer that train on many ranks. The engine knows how to step, the training loop when."""

    config: Mapping[str, Any] | None = None  # of DeepSpeed, which the run folder keeps
    wants_block_norms = False  # whether the next step is to return them

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        optim: OptimSection,
        train: TrainSection,
        topology: Topology,
    ):
        super().__init__(module, optimizer, optim, train, topology)
        self.loss = LOSSES[train.loss].build()  # the trainer sets that of the run's classes
        self._drop_paths = [part for part in module.modules() if isinstance(part, DropPath) and part.drop_prob]
        self._forward_buffers = ForwardBuffers(module)
        self._checkpoints, self._recomputes = train.activation_checkpointing, True
        self._world = topology.world

    def step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """One optimizer step over the micro-batches of this rank, at this learning rate. Every rank calls it.

        Where the gradient's norm is not finite, nothing changes but fp16's loss scale: neither weights and optimizer
        nor the statistics of batch norms and the EMA.
        """
        set_rate(self.optimizer, lr)
        before, tables = self._forward_buffers.copy(), self._forward_buffers.table_versions()
        result = self.train_step(batches)
        if names := changed(tables, self._forward_buffers.table_versions()):
            raise InputError(
                f"model: its forward pass changes {names[0]}, a table of integers, of which each rank would have one "
                "of its own; use floating-point numbers, which are averaged over ranks"
            )
        stepped = result.grad_norm.isfinite()
        self._forward_buffers.restore(before, unless=stepped)
        if self.ema:
            self.ema.update(self._ema_sources(), stepped)
        return result

    @abstractmethod
    def train_step(self, batches: Sequence[Batch]) -> StepResult:
        """Forward, backward, clip and update. Every rank calls it, with as many micro-batches.

        Where the gradient's norm is not finite, weights and optimizer stay as they are on all ranks.
        """

    @abstractmethod
    def evaluate_mode(self) -> torch.autocast:
        """A context in which `module` computes in the precision of training."""

    def set_sample_keys(self, batch: Batch) -> None:
        """Tell stochastic depth which samples the next forward pass is of."""
        if self._drop_paths:
            set_drop_path_keys(self._drop_paths, batch.keys)

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """A context for the backward pass of a micro-batch, in which nothing but gradients changes.

        Activation checkpointing calls parts of the network again in it, where batch norms would count the micro-batch
        a second time. A network may do so without train.activation_checkpointing, which its first micro-batch shows.
        """
        if not self._recomputes:
            yield
            return
        forward, versions = self._forward_buffers.copy(), self._forward_buffers.versions()
        yield
        if not self._checkpoints:
            self._recomputes = bool(changed(versions, self._forward_buffers.versions()))
        self._forward_buffers.restore(forward)

    def check_used(self, unused: Sequence[str]) -> None:
        """`InputError` where parameters got no gradient; engines would differ in what they do to them."""
        if unused:
            names = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
            raise InputError(
                f"model: the loss does not depend on {len(unused)} of its parameters ({names}); train.freeze "
                "[unused] leaves out what the network never uses, anything else must be used in every step"
            )

    def average_buffers(self) -> None:
        """Average what a forward pass changes, such as running statistics, and the EMA of it, where ranks differ.

        Every rank calls it, before evaluation and saving, so that all ranks evaluate and save one model. Synchronised
        batch norms are the same on all ranks; those of a rank's own, instance norms and others are not.
        """
        if self._world > 1:
            average_over_ranks(self._forward_buffers.tensors())
            if self.ema:
                averages = self.ema.tensors[len(self.optimizer_tensors()) :]
                average_over_ranks(dict(zip(self._float_buffers(), averages, strict=True)))

    def blocks(self) -> list[str]:
        """The parts of the network whose gradients have norms of their own: stem, blocks.0, blocks.1, ... head."""
        return list(dict.fromkeys(block_of(name) for name, _ in self.param_positions()))


def block_of(name: str) -> str:
    """The block of a parameter: blocks.3.norm.weight -> blocks.3, head.bias -> head."""
    return ".".join(name.split(".")[: 2 if re.match(r"\w+\.\d+\.", name) else 1])


def set_timeout(seconds: int, group: dist.ProcessGroup) -> None:
    """Set how long operations of a process group may take; `torch.distributed.set_timeout` of newer ones."""
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timedelta(seconds=seconds), group)
    else:
        from torch.distributed.distributed_c10d import _set_pg_timeout

        _set_pg_timeout(timedelta(seconds=seconds), group)
