"""`widemix cost --rehearse`: a step of a recipe on many ranks in one process, without a GPU or a network.

This process is rank 0 of PyTorch's fake process group; engine and optimizer are those that train, so that what would
fail on the cluster fails here. With DDP and FSDP all tensors are fake, and the micro-batch has its true size;
DeepSpeed copies memory itself, so it gets real tensors and one sample. Fake tensors have no values, which loss
scaling needs, so fp16 is rehearsed as bf16, which has the same size.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from widemix.data.batches import Batch
from widemix.distributed.topology import Topology
from widemix.engine import build_engine, check_engine
from widemix.engine.contract import Engine
from widemix.engine.ddp import DDPEngine
from widemix.estimate.fake import MemoryTracker, fake_inputs, fake_mode, fake_network, prepare_to_train, unused_of
from widemix.models.registry import build_model
from widemix.recipe import Recipe, check_world


class Rehearsal(NamedTuple):
    """What was counted on rank 0 in the second step, since buckets and optimizer state are created in the first."""

    calls: dict[str, int]  # by kind of collective
    bytes: dict[str, int]  # of the whole tensors, by kind of collective
    kept: int  # bytes that stay alive between steps
    peak: int | None  # most bytes alive; None if the micro-batch did not have its true size
    seconds: float  # that the rehearsal took


def rehearse(recipe: Recipe, world: int, local_world: int) -> Rehearsal:
    """Build the engine as rank 0 of `world` and take two steps.

    local_world: ranks on a node.

    Raises what the engine would raise on the cluster.
    """
    began = time.perf_counter()
    check_world(recipe, world)
    train = recipe.train
    if train.precision == "fp16":
        train = train.model_copy(update={"precision": "bf16"})
    topology = Topology(0, world, 0, local_world, torch.device("cpu"))
    check_engine(recipe.engine, recipe.optim, train, topology)
    real = recipe.engine.kind == "deepspeed"
    micro = 1 if real else train.micro_batch_size(world)
    with _fake_group(world):
        mode: Any = nullcontext() if real else fake_mode()
        if real:
            module = build_model(recipe.model, recipe.data.image_size, recipe.data.num_classes)
            eager = train.model_copy(update={"compile": False, "fp8": False})
            prepare_to_train(module, eager, topology.device, unused_of(recipe, module))
        else:
            module = fake_network(recipe, mode)
        memory = MemoryTracker()
        with memory:
            memory.watch(*module.parameters(), *module.buffers())
            engine = build_engine(recipe.engine, module, recipe.optim, train, topology)
        with mode:
            targets = torch.full((micro, recipe.data.num_classes), 1 / recipe.data.num_classes)
            batches = [Batch(fake_inputs(recipe, micro), targets, np.arange(micro))] * train.grad_accum_steps
        for _ in range(2):
            memory.reset()
            _rebuild_buckets(engine)
            with mode, memory:
                engine.step(batches, recipe.optim.lr)
    seconds = time.perf_counter() - began
    return Rehearsal(dict(memory.calls), dict(memory.bytes), memory.alive, None if real else memory.peak, seconds)


def _rebuild_buckets(engine: Engine) -> None:
    """Rebuild DDP's buckets as it does when the second step begins; within the fake mode it could not."""
    if isinstance(engine, DDPEngine):
        engine.model.reducer._rebuild_buckets()


@contextmanager
def _fake_group(world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
