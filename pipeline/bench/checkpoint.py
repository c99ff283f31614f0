"""What a checkpoint costs: how long it stops the training, how long it takes, how large it is.

Mixer-B/16 on two ranks of this machine, two pictures a rank and step: the state is that of a real run, and its size
does not depend on the batch. Every rank runs this module, started by torchrun.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipeline.data.loader import Batch
from pipeline.distributed import topology
from pipeline.engine import build_engine
from pipeline.errors import InputError
from pipeline.models.registry import build_model
from pipeline.recipe import load_recipe
from pipeline.run.checkpoint import MARK, Position, RetentionPolicy
from pipeline.run.saving import Saver

VERSIONS = ("torch", "deepspeed", "safetensors")
RECIPE = Path(__file__).parents[2] / "recipes/imagenet/mixer_b16.yaml"
RANKS, INTERVAL = 2, 600.0  # seconds between saves of which the stall is told as a share
ENGINES = {
    "DDP": [("engine.kind", "ddp")],
    "FSDP2": [("engine.kind", "fsdp")],
    "DeepSpeed, ZeRO 1": [("engine.kind", "deepspeed"), ("engine.zero_stage", "1")],
    "DeepSpeed, ZeRO 3": [("engine.kind", "deepspeed"), ("engine.zero_stage", "3")],
}


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [_engine(name, arguments.rounds) for name in ENGINES]


def _engine(name: str, rounds: int) -> dict[str, Any]:
    """The figures of one engine, from processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        words = ["-m", "pipeline.bench.checkpoint", name, str(rounds), folder]
        done = subprocess.run([*launcher, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise InputError(f"{name}: the ranks failed: {done.stderr.strip().splitlines()[-1]}")
        return json.loads((Path(folder) / "row.json").read_text())


def measure(name: str, rounds: int, folder: Path) -> dict[str, Any]:
    """On every rank: train, save, train on while it is written; medians over rounds.

    `stall_s`: the training stands still. `slower_s`: what the steps beside the writing take longer than others, all
    together. `written_s`: until COMPLETE stands. `stall_percent`, `share_percent`: the stall, alone and with
    `slower_s`, as a share of INTERVAL.
    """
    here = topology.read_topology()
    store = topology.start(here, timeout=600)
    torch.set_num_threads(topology.share_cpus(here))
    batch = [("train.global_batch", str(2 * RANKS)), ("augment.mix_group", "2"), ("train.grad_accum_steps", "1")]
    recipe = load_recipe(RECIPE, [*batch, *ENGINES[name]])
    module = build_model(recipe.model, recipe.data.image_size, recipe.data.num_classes).to(here.device)
    engine = build_engine(recipe.engine, module, recipe.optim, recipe.train, here)
    side, classes = recipe.data.image_size, recipe.data.num_classes
    pictures = torch.randn(2, 3, side, side, device=here.device)
    batches = [Batch(pictures, torch.full((2, classes), 1 / classes, device=here.device), np.zeros(2, np.int64))]

    def step() -> float:
        began = time.perf_counter()
        engine.step(batches, 1e-4).loss.item()
        return time.perf_counter() - began

    saver = Saver(folder, here, store.clone(), RetentionPolicy(1))
    step()
    alone, beside, stalls, times = [], [], [], []
    for number in range(1, rounds + 1):
        alone += [step(), step()]
        dist.barrier()
        clock, began = time.time(), time.perf_counter()
        position = Position(step=number, order=number, seconds=0, scalars=engine.scalars(), figures={}, recipe={})
        saver.begin(engine.local_shards(), position)
        stalls.append(time.perf_counter() - began)
        extra, writing = 0.0, torch.ones(1)
        while writing:
            extra += step() - statistics.median(alone)
            writing = torch.tensor(float(saver.writing))
            dist.all_reduce(writing, op=dist.ReduceOp.MAX)
        beside.append(extra)
        failed = saver.finish()
        assert failed is None, failed
        dist.barrier()
        times.append((folder / f"checkpoints/{number:08d}" / MARK).stat().st_mtime - clock)
    size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    topology.stop()
    stall, slower = statistics.median(stalls), statistics.median(beside)
    return {
        "name": name,
        "stall_s": round(stall, 3),
        "stall_percent": round(100 * stall / INTERVAL, 3),
        "slower_s": round(slower, 2),
        "share_percent": round(100 * (stall + max(0.0, slower)) / INTERVAL, 3),
        "written_s": round(statistics.median(times), 2),
        "size_mb": round(size / 1e6, 1),
        "step_s": round(statistics.median(alone), 2),
    }


def main() -> None:
    name, rounds, folder = sys.argv[1:]
    row = measure(name, int(rounds), Path(folder))
    if os.environ["RANK"] == "0":
        (Path(folder) / "row.json").write_text(json.dumps(row))


if __name__ == "__main__":
    main()
