"""Weak scaling of a recipe: the same batch per rank on more and more ranks, and what the time of a step consists of.

Timed on every rank: in turns, a plain step of this rank alone on one batch (compute) and the engine's step on the
same batch (its additional time is exposed communication, and waiting for slower ranks); then the engine's step on
batches from the loader (the time waiting for them is `data wait`; what remains is `other`: copies, mixup, Python).
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from widemix.bench.report import machine
from widemix.bench.timing import Contestant, time_in_turns, wall_clock
from widemix.data.batches import Batch
from widemix.data.loader import TrainLoader, check_model
from widemix.data.precision import DTYPES, autocast
from widemix.distributed.topology import (
    Topology,
    mean_over_ranks,
    process_group,
    read_topology,
    set_matmul_precision,
    share_cpus,
)
from widemix.engine import apply_training_options, build_engine, check_engine
from widemix.engine.memory_layout import set_memory_layout
from widemix.errors import InputError
from widemix.files import atomic_write
from widemix.models.registry import build_model
from widemix.optim.build import build_optimizer, set_rate
from widemix.recipe import Recipe, check_world
from widemix.recipe.losses import LOSSES

PARTS = ("compute", "exposed communication", "data wait", "other")
VERSIONS = ("torch", "numpy")
WARMUP = 3  # steps that allocate buckets and states, and are not counted


def measure_scale(recipe: Recipe, batch: int, steps: int, cpus: int | None = None) -> dict[str, Any] | None:
    """Return the row of these ranks, on rank 0: images/s of all, seconds of a step and its parts. All ranks call it.

    `batch` is that of a micro-batch and rank. With `cpus` each rank is bound to that many CPUs of its node until the
    process ends, so that a single rank has no more than each of many. `InputError` if the batch does not fit.
    """
    topology = read_topology()
    group = recipe.augment.mix_group if recipe.augment.mixes_images else 1
    if batch % group:
        raise InputError(f"--batch {batch}: must be a multiple of augment.mix_group {group}")
    train = recipe.train.model_copy(update={"global_batch": batch * recipe.train.grad_accum_steps * topology.world})
    recipe = recipe.model_copy(update={"train": train})
    check_world(recipe, topology.world)
    check_engine(recipe.engine, recipe.optim, train, topology)
    if cpus:
        bind_to_cpus(cpus, topology)
    with process_group(topology, recipe.engine.timeout_s):
        threads = cpus or share_cpus(topology)
        torch.set_num_threads(threads)
        set_matmul_precision(train.matmul_precision)
        data = recipe.data.model_copy(update={"workers": recipe.data.workers or threads})
        loader = TrainLoader(data, recipe.augment, train, topology)
        check_model(recipe.model, loader)
        if loader.steps < WARMUP + 1:
            raise InputError(
                f"--batch {batch}: {topology.world} ranks leave {loader.steps} steps an epoch; take a smaller one"
            )
        return _row(recipe, loader, topology, steps, settings_of(recipe, batch, cpus))


def bind_to_cpus(cpus: int, topology: Topology) -> None:
    """Bind all present and future threads of this process to CPUs that no other rank of the node uses.

    `InputError` if the ranks of the node together need more CPUs than they may use.
    """
    allowed = sorted(os.sched_getaffinity(0))
    own = allowed[topology.local_rank * cpus : (topology.local_rank + 1) * cpus]
    if topology.local_world * cpus > len(allowed):
        raise InputError(f"--cpus {cpus}: {topology.local_world} ranks of a node may use {len(allowed)} CPUs in all")
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), own)


def _row(
    recipe: Recipe, loader: TrainLoader, topology: Topology, steps: int, settings: dict[str, Any]
) -> dict[str, Any] | None:
    with loader.batches(0) as batches:
        kept = list(islice(batches, recipe.train.grad_accum_steps))
    plain, _ = build_network(recipe, topology)
    module, memory_layout = build_network(recipe, topology)
    engine = build_engine(recipe.engine, module, recipe.optim, recipe.train, topology)
    alone, together = time_steps(
        plain_step(recipe, plain, kept, topology), lambda: engine.step(kept, 0.0), steps, topology
    )
    whole, waited = time_with_loader(engine.step, loader, recipe.train.grad_accum_steps, steps, topology)
    parts = step_parts(alone, together, whole, waited, topology.world)
    mean = mean_over_ranks(torch.tensor([whole, *parts], dtype=torch.float64)).tolist()
    if not topology.is_main:
        return None
    return {
        "ranks": topology.world,
        "nodes": topology.world // topology.local_world,
        "images_per_s": recipe.train.global_batch / mean[0],
        "step": mean[0],
        **dict(zip(PARTS, mean[1:], strict=True)),
        "settings": settings,
        "engine": recipe.engine.kind,
        "memory_layout": memory_layout,
        "device": torch.cuda.get_device_name(topology.device)
        if topology.device.type == "cuda"
        else platform.machine(),
        "machine": machine(*VERSIONS),
    }


def step_parts(alone: float, together: float, whole: float, waited: float, world: int) -> tuple[float, ...]:
    """Return the seconds of each of PARTS in a step of `whole` seconds, of which it `waited` for data.

    alone: of a plain step; together: of the engine's on the same batch.
    """
    exposed = max(0.0, together - alone) if world > 1 else 0.0  # on one rank the engine's part is `other`
    return alone, exposed, waited, max(0.0, whole - waited - alone - exposed)


def build_network(recipe: Recipe, topology: Topology) -> tuple[nn.Module, str | None]:
    """Return the network on the device, and how it computes its blocks, as training chooses that."""
    torch.manual_seed(recipe.train.seed)
    module = build_model(recipe.model, recipe.data.image_size, recipe.data.num_classes).to(topology.device)
    apply_training_options(module, recipe.train, topology.device)
    return module, set_memory_layout(module, recipe.engine, recipe.train, topology)


def plain_step(recipe: Recipe, module: nn.Module, batches: list[Batch], topology: Topology) -> Callable[[], object]:
    """Return a step without an engine: forward, backward and update of full, unsharded weights."""
    module.train()
    optimizer = build_optimizer(recipe.optim, module)
    set_rate(optimizer, 0.0)
    loss = LOSSES[recipe.train.loss].build()

    def step() -> None:
        for batch in batches:
            with autocast(topology.device, DTYPES[recipe.train.precision]):
                logits = module(batch.inputs)
            (loss(logits, batch.targets) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def time_steps(
    plain: Callable[[], object], engine: Callable[[], object], steps: int, topology: Topology
) -> tuple[float, float]:
    """Return the median seconds of a plain step and of an engine's. All ranks start each step together."""

    def once(step: Callable[[], object], number: int) -> int:
        step()
        return 1

    contestants: dict[str, Contestant] = {"plain": partial(once, plain), "engine": partial(once, engine)}
    clock = partial(wall_clock, topology.device)
    seconds = time_in_turns(contestants, steps, clock, warmup=WARMUP, before=dist.barrier, shown=dist.get_rank() == 0)
    return statistics.median(seconds["plain"]), statistics.median(seconds["engine"])


def time_with_loader(
    step: Callable[[list[Batch], float], object], loader: TrainLoader, parts: int, steps: int, topology: Topology
) -> tuple[float, float]:
    """Return the mean seconds of a step and of waiting for its batch, over `steps` steps.

    The first WARMUP steps of each epoch are not counted.
    """
    whole = waited = 0.0
    done = epoch = 0
    while done < steps:
        with loader.batches(epoch) as batches:
            for number in range(loader.steps):
                before, began = batches.waited, time.perf_counter()
                step(list(islice(batches, parts)), 0.0)
                seconds = wall_clock(topology.device) - began
                if number >= WARMUP:
                    whole += seconds
                    waited += batches.waited - before
                    done += 1
                if done == steps:
                    break
        epoch += 1
    return whole / steps, waited / steps


def settings_of(recipe: Recipe, batch: int, cpus: int | None = None) -> dict[str, Any]:
    """Return what all rows of a folder share: batch, CPUs, and the recipe without global batch and data path."""
    settings = recipe.model_dump(mode="json") | {"batch": batch, "cpus": cpus}
    del settings["train"]["global_batch"], settings["data"]["path"]
    return settings


def read_rows(folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a folder; `InputError` if one was measured with other settings."""
    rows = {path: json.loads(path.read_text()) for path in sorted(folder.glob("*-ranks.json"))}
    for path, row in rows.items():
        if other := [name for name, value in settings.items() if row.get("settings", {}).get(name) != value]:
            raise InputError(f"{path}: measured with another {', '.join(other)}; name another folder with --to")
    return list(rows.values())


def write_row(folder: Path, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Add a row to a folder, in place of an earlier one of as many ranks; return all, as `with_efficiency` does."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / f"{row['ranks']}-ranks.json", json.dumps(row, indent=1) + "\n")
    return with_efficiency(sorted(read_rows(folder, row["settings"]), key=lambda row: row["ranks"]))


def with_efficiency(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with `efficiency`: images/s per rank as a fraction of the first row's."""
    first = rows[0]["images_per_s"] / rows[0]["ranks"]
    return [row | {"efficiency": row["images_per_s"] / row["ranks"] / first} for row in rows]
