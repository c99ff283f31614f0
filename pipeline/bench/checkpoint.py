"""The cost of a checkpoint: how long training stalls, how long writing takes, how large the files are.

Mixer-B/16 on two ranks of this machine, two images per rank and step: the state has the size of a real run's, which
depends on neither batch nor precision. On its CPUs, unless it has a GPU for each rank. Every rank runs this module,
started by torchrun.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from widemix.bench.timing import elapsed
from widemix.data.batches import Batch
from widemix.distributed.topology import Topology, process_group, read_topology, set_torch_threads
from widemix.engine import Engine, build_engine
from widemix.errors import InputError
from widemix.models.registry import build_model
from widemix.processes import end_with_torchrun
from widemix.recipe import Recipe, load_recipe
from widemix.recipe.files import SHIPPED
from widemix.run.checkpoint import COMPLETE, Position, RetentionPolicy
from widemix.run.saving import Saver

VERSIONS = ("torch", "deepspeed", "safetensors")
RECIPE = SHIPPED / "imagenet/mixer_b16.yaml"
RANKS, INTERVAL = 2, 600.0  # seconds between saves, for the stall as a fraction of the training time
ENGINES = {
    "DDP": [("engine.kind", "ddp")],
    "FSDP2": [("engine.kind", "fsdp")],
    "DeepSpeed, ZeRO 1": [("engine.kind", "deepspeed"), ("engine.zero_stage", "1")],
    "DeepSpeed, ZeRO 3": [("engine.kind", "deepspeed"), ("engine.zero_stage", "3")],
}


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of `widemix bench checkpoint`."""
    return [_measure_in_processes(name, arguments.rounds) for name in ENGINES]


def _measure_in_processes(name: str, rounds: int) -> dict[str, Any]:
    """Start the ranks of one engine and return their row."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        arguments = ["-m", "widemix.bench.checkpoint", name, str(rounds), folder, str(RECIPE)]
        environ = os.environ | ({} if torch.cuda.device_count() >= RANKS else {"CUDA_VISIBLE_DEVICES": ""})
        done = subprocess.run([*launcher, *arguments], env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InputError(f"{name}: the ranks failed: {done.stderr.strip().splitlines()[-1]}")
        return json.loads((Path(folder) / "row.json").read_text())


def measure(name: str, rounds: int, folder: Path, path: Path) -> dict[str, Any]:
    """On every rank: train the recipe at `path`, save, and train on while the checkpoint is written. Return the row.

    Medians over rounds. `stall_s`: training waits. `slower_s`: the additional time of all steps during the writing.
    `written_s`: until COMPLETE is written. `stall_percent`, `total_percent`: the stall, without and with `slower_s`,
    as a fraction of INTERVAL.
    """
    topology = read_topology()
    with process_group(topology, timeout_s=600) as store:
        set_torch_threads(topology)
        engine, batches = _build(engine_recipe(name, topology.device, path), topology)
        saver = Saver(folder, topology, store.clone(), RetentionPolicy(1))
        step = partial(elapsed, lambda: engine.step(batches, 1e-4), topology.device)
        step()
        alone: list[float] = []
        saves = [time_save(number, engine, saver, step, alone, folder) for number in range(1, rounds + 1)]
    size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    return row_of(name, saves, alone, size)


def row_of(name: str, saves: list[tuple[float, float, float]], alone: list[float], size: int) -> dict[str, Any]:
    """Return medians of saves, of which each is as `time_save` returns it, and of steps alone; `size` in bytes."""
    stall, slower, written = (statistics.median(column) for column in zip(*saves, strict=True))
    return {
        "name": name,
        "stall_s": round(stall, 3),
        "stall_percent": round(100 * stall / INTERVAL, 3),
        "slower_s": round(slower, 2),
        "total_percent": round(100 * (stall + max(0.0, slower)) / INTERVAL, 3),
        "written_s": round(written, 2),
        "size_mb": round(size / 1e6, 1),
        "step_s": round(statistics.median(alone), 2),
    }


def _build(recipe: Recipe, topology: Topology) -> tuple[Engine, list[Batch]]:
    """Build an engine of the recipe's network and the batches of a step, two random images."""
    side, classes, device = recipe.data.image_size, recipe.data.num_classes, topology.device
    module = build_model(recipe.model, side, classes).to(device)
    engine = build_engine(recipe.engine, module, recipe.optim, recipe.train, topology)
    images = torch.randn(2, 3, side, side, device=device)
    return engine, [Batch(images, torch.full((2, classes), 1 / classes, device=device), np.zeros(2, np.int64))]


def engine_recipe(name: str, device: torch.device, path: Path = RECIPE) -> Recipe:
    """Return the recipe for an engine of ENGINES, of two images a rank.

    On CPUs in fp32, since bf16 is many times as slow on those that only imitate it.
    """
    batch = [("train.global_batch", str(2 * RANKS)), ("augment.mix_group", "2"), ("train.grad_accum_steps", "1")]
    precision = ("train.precision", "bf16" if device.type == "cuda" else "fp32")
    return load_recipe(path, [*batch, precision, *ENGINES[name]])


def time_save(
    number: int, engine: Engine, saver: Saver, step: Callable[[], float], alone: list[float], folder: Path
) -> tuple[float, float, float]:
    """Save once while training; return the seconds of the stall, of slower steps, and until it was written.

    The seconds of two steps before the save are appended to `alone`.
    """
    alone += [step(), step()]
    dist.barrier()
    clock, began = time.time(), time.perf_counter()
    position = Position(step=number, data_step=number, seconds=0, scalars=engine.scalars(), metrics={}, recipe={})
    saver.begin(engine.local_shards(), position)
    stall = time.perf_counter() - began
    slower, writing = 0.0, torch.ones(1)
    while writing:
        slower += step() - statistics.median(alone)
        writing = torch.tensor(float(saver.writing))
        dist.all_reduce(writing, op=dist.ReduceOp.MAX)
    failed = saver.finish()
    assert failed is None, failed
    dist.barrier()
    written = (folder / f"checkpoints/{number:08d}" / COMPLETE).stat().st_mtime - clock
    return stall, slower, written


def main() -> None:
    """Run one rank; rank 0 writes row.json."""
    end_with_torchrun()
    name, rounds, folder, recipe = sys.argv[1:]
    row = measure(name, int(rounds), Path(folder), Path(recipe))
    if os.environ["RANK"] == "0":
        (Path(folder) / "row.json").write_text(json.dumps(row))


if __name__ == "__main__":
    main()
