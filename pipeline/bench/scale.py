"""Weak scaling of a recipe: the same batch a rank on more and more ranks, and where the time of a step goes.

Timed on every rank, in turns: a plain step of this rank alone on one batch (compute), and the engine's step on that
batch (what it takes longer is communication that nothing hides, and waiting for slower ranks), and the engine's step
on batches from the loader (whose waiting is counted there, and the rest is `other`: copies, mixing, Python).
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.bench.report import machine
from pipeline.data.loader import Batch, TrainLoader, check_model
from pipeline.data.precision import DTYPES
from pipeline.distributed import topology
from pipeline.distributed.topology import Topology
from pipeline.engine import build_engine, check_engine, prepare
from pipeline.engine.loss import LOSSES, autocast
from pipeline.errors import InputError
from pipeline.models.registry import build_model
from pipeline.optim.build import build_optimizer, set_rate
from pipeline.recipe import Recipe, check_world

PARTS = ("compute", "exposed communication", "data wait", "other")
VERSIONS = ("torch", "numpy")
WARM = 3  # steps that draw up buckets and states, and are not counted


def measure_scale(recipe: Recipe, batch: int, steps: int, cpus: int | None = None) -> dict[str, Any] | None:
    """The row of these ranks, on rank 0: pictures/s of all, seconds of a step and of its parts. All ranks call it.

    With `cpus` each rank keeps to so many of its node's, for good: one rank alone then has no more than each of many.
    """
    here = topology.read_topology()
    group = recipe.augment.mix_group if recipe.augment.mixing else 1
    if batch % group:
        raise InputError(f"--batch {batch}: must be a multiple of augment.mix_group {group}")
    train = recipe.train.model_copy(update={"global_batch": batch * recipe.train.grad_accum_steps * here.world})
    recipe = recipe.model_copy(update={"train": train})
    check_world(recipe, here.world)
    check_engine(recipe.engine, recipe.optim, train, here)
    if cpus:
        keep_to(cpus, here)
    topology.start(here, recipe.engine.timeout_s)
    try:
        threads = cpus or topology.share_cpus(here)
        torch.set_num_threads(threads)
        data = recipe.data.model_copy(update={"workers": recipe.data.workers or threads})
        loader = TrainLoader(data, recipe.augment, train, here)
        check_model(recipe.model, loader)
        if loader.steps < WARM + 1:
            raise InputError(
                f"--batch {batch}: {here.world} ranks leave {loader.steps} steps an epoch; take a smaller one"
            )
        return _row(recipe, loader, here, steps, settings_of(recipe, batch, cpus))
    finally:
        topology.stop()


def keep_to(cpus: int, here: Topology) -> None:
    """Bind every thread of this process, and all that are still to come, to CPUs that no other rank has."""
    allowed = sorted(os.sched_getaffinity(0))
    own = allowed[here.local_rank * cpus : (here.local_rank + 1) * cpus]
    if here.local_world * cpus > len(allowed):
        raise InputError(f"--cpus {cpus}: {here.local_world} ranks of a node may use {len(allowed)} CPUs in all")
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), own)


def _row(
    recipe: Recipe, loader: TrainLoader, here: Topology, steps: int, settings: dict[str, Any]
) -> dict[str, Any] | None:
    with loader.batches(0) as batches:
        kept = list(islice(batches, recipe.train.grad_accum_steps))
    plain = _plain_step(recipe, kept, here)
    torch.manual_seed(recipe.train.seed)
    module = build_model(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    prepare(module, recipe.train)
    engine = build_engine(recipe.engine, module.to(here.device), recipe.optim, recipe.train, here)
    alone, together = _time_in_turns((plain, lambda: engine.step(kept, 0.0)), steps, here)
    whole, waited = _time_with_loader(engine.step, loader, recipe.train.grad_accum_steps, steps, here)
    sent = max(0.0, together - alone) if here.world > 1 else 0.0  # what an engine adds to one rank is `other`
    parts = (alone, sent, waited, max(0.0, whole - waited - alone - sent))
    mean = topology.mean_over_ranks(torch.tensor([whole, *parts], dtype=torch.float64)).tolist()
    if not here.is_main:
        return None
    return {
        "ranks": here.world,
        "nodes": here.world // here.local_world,
        "images_per_s": recipe.train.global_batch / mean[0],
        "step": mean[0],
        **dict(zip(PARTS, mean[1:], strict=True)),
        "settings": settings,
        "engine": recipe.engine.kind,
        "device": torch.cuda.get_device_name(here.device) if here.device.type == "cuda" else platform.machine(),
        "machine": machine(*VERSIONS),
    }


def _plain_step(recipe: Recipe, batches: list[Batch], here: Topology) -> Callable[[], object]:
    """What a rank computes in a step, without an engine: forward, backward, update, whole weights."""
    torch.manual_seed(recipe.train.seed)
    module = build_model(recipe.model, recipe.data.image_size, recipe.data.num_classes).to(here.device)
    prepare(module, recipe.train)
    module.train()
    optimizer = build_optimizer(recipe.optim, module)
    set_rate(optimizer, 0.0)
    loss = LOSSES[recipe.train.loss]

    def step() -> None:
        for batch in batches:
            with autocast(here.device, DTYPES[recipe.train.precision]):
                logits = module(batch.inputs)
            (loss(logits, batch.targets) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _time_in_turns(actions: Sequence[Callable[[], object]], steps: int, here: Topology) -> list[float]:
    """The median seconds of each, after some that are not counted. All ranks begin each together."""
    found: list[list[float]] = [[] for _ in actions]
    for _ in range(WARM + steps):
        for seconds, action in zip(found, actions, strict=True):
            dist.barrier()
            seconds.append(_seconds(action, here))
    return [statistics.median(seconds[WARM:]) for seconds in found]


def _time_with_loader(
    step: Callable[[list[Batch], float], object], loader: TrainLoader, parts: int, steps: int, here: Topology
) -> tuple[float, float]:
    """Mean seconds of a step with its batch, and of waiting for it, over `steps` after the first of each epoch."""
    whole = waited = 0.0
    done = epoch = 0
    dist.barrier()
    while done < steps:
        with loader.batches(epoch) as batches:
            for number in range(loader.steps):
                before, began = batches.waited, time.perf_counter()
                step(list(islice(batches, parts)), 0.0)
                if here.device.type == "cuda":
                    torch.cuda.synchronize(here.device)
                if number >= WARM:
                    whole += time.perf_counter() - began
                    waited += batches.waited - before
                    done += 1
                if done == steps:
                    break
        epoch += 1
    return whole / steps, waited / steps


def _seconds(step: Callable[[], object], here: Topology) -> float:
    began = time.perf_counter()
    step()
    if here.device.type == "cuda":
        torch.cuda.synchronize(here.device)
    return time.perf_counter() - began


def settings_of(recipe: Recipe, batch: int, cpus: int | None = None) -> dict[str, Any]:
    """What the rows of a folder must share: all of the recipe but the batch of all ranks and where the data lie."""
    settings = recipe.model_dump(mode="json") | {"batch": batch, "cpus": cpus}
    del settings["train"]["global_batch"], settings["data"]["path"]
    return settings


def read_rows(folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that a folder has; `InputError` if one was measured with other settings."""
    rows = {path: json.loads(path.read_text()) for path in sorted(folder.glob("*-ranks.json"))}
    for path, row in rows.items():
        if other := [name for name, value in settings.items() if row.get("settings", {}).get(name) != value]:
            raise InputError(f"{path}: measured with another {', '.join(other)}; name another folder with --to")
    return list(rows.values())


def write_row(folder: Path, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Keep a row beside those of other runs; all of them, by ranks, with the efficiency against the smallest."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{row['ranks']}-ranks.json").write_text(json.dumps(row, indent=1) + "\n")
    return with_efficiency(sorted(read_rows(folder, row["settings"]), key=lambda found: found["ranks"]))


def with_efficiency(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pictures a second and rank, as a share of the first row's."""
    first = rows[0]["images_per_s"] / rows[0]["ranks"]
    return [row | {"efficiency": row["images_per_s"] / row["ranks"] / first} for row in rows]
