"""A step of a recipe on many ranks in one process: what cannot work there fails here, without a GPU or a network.

The group is PyTorch's fake one, in which this process is rank 0 of so many. Engine and optimiser are those that
train. With DDP and FSDP all tensors are fake, at the true micro-batch; DeepSpeed moves memory about by itself, so it
has real ones, and one sample. Fake numbers have no value, so fp16 is rehearsed as bf16, which is as large.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipeline.data.loader import Batch
from pipeline.distributed.topology import Topology
from pipeline.engine import build_engine, check_engine, prepare
from pipeline.engine.contract import Engine
from pipeline.estimate.fake import MemoryTracker, fake_inputs, fake_mode, fake_network
from pipeline.models.registry import build_model
from pipeline.recipe import Recipe, check_world


class Rehearsal(NamedTuple):
    """Of rank 0, in the second step: the first one draws up buckets and optimiser states."""

    calls: dict[str, int]  # by kind of collective
    bytes: dict[str, int]  # of the whole tensors, by kind of collective
    kept: int  # bytes of what stays from step to step
    peak: int | None  # bytes at most; None where the micro-batch was not the true one
    seconds: float  # that the rehearsal took


def rehearse(recipe: Recipe, world: int, local_world: int) -> Rehearsal:
    """Build the engine on rank 0 of `world` and take two steps; what they raise, the cluster would have raised."""
    began = time.perf_counter()
    check_world(recipe, world)
    train = recipe.train
    if train.precision == "fp16":
        train = train.model_copy(update={"precision": "bf16"})
    here = Topology(0, world, 0, local_world, torch.device("cpu"))
    check_engine(recipe.engine, recipe.optim, train, here)
    real = recipe.engine.kind == "deepspeed"
    micro = 1 if real else train.global_batch // world // train.grad_accum_steps
    with _fake_group(world):
        mode: Any = nullcontext() if real else fake_mode()
        if real:
            module = build_model(recipe.model, recipe.data.image_size, recipe.data.num_classes)
            prepare(module, train.model_copy(update={"compile": False}))
        else:
            module = fake_network(recipe, mode)
        ledger = MemoryTracker()
        with ledger:
            ledger.watch(*module.parameters(), *module.buffers())
            engine = build_engine(recipe.engine, module, recipe.optim, train, here)
        with mode:
            targets = torch.full((micro, recipe.data.num_classes), 1 / recipe.data.num_classes)
            batches = [Batch(fake_inputs(recipe, micro), targets, np.arange(micro))] * train.grad_accum_steps
        for _ in range(2):
            ledger.reset()
            _rebuild_buckets(engine)
            with mode, ledger:
                engine.step(batches, recipe.optim.lr)
    seconds = time.perf_counter() - began
    return Rehearsal(dict(ledger.calls), dict(ledger.bytes), ledger.alive, None if real else ledger.peak, seconds)


def _rebuild_buckets(engine: Engine) -> None:
    """DDP does so when the second step begins; it can't with fake tensors about, so it does here."""
    if hasattr(engine, "model"):
        engine.model.reducer._rebuild_buckets()


@contextmanager
def _fake_group(world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
