"""The training loop against the forty lines that a textbook would write, on Mixer-S/16, from batches in memory.

Both train with DDP and AdamW, clip, and follow the schedule; on a GPU in bf16, on a CPU in fp32 on one thread. The
whole loop also seeds, looks for signals and NaN, beats, and writes the record as a recipe that says nothing about it
would: a round is the steps from one line to the next, and the contestants share it out in short turns. A second
network of a few numbers shows what that costs a step in microseconds, where no arithmetic hides it.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.data.loader import Batch, EvalLoader, TrainLoader
from pipeline.distributed import topology
from pipeline.distributed.signals import StopRequest
from pipeline.distributed.topology import Topology
from pipeline.distributed.watchdog import Watch
from pipeline.engine import Engine, build_engine
from pipeline.models.registry import build_model
from pipeline.recipe import Recipe
from pipeline.recipe.train import LogSection
from pipeline.run.checkpoint import RetentionPolicy
from pipeline.run.metrics import Record, peak_memory
from pipeline.run.progress import Progress
from pipeline.run.saving import Saver
from pipeline.training.faults import Rollback
from pipeline.training.loop import Loop, Run
from pipeline.training.schedule import build_schedule

VERSIONS = ("torch", "timm")
PLAIN, ENGINE, LOOP = "plain loop", "our engine alone", "our whole loop"
S16 = {"patch_size": 16, "tokens": 196, "channels": 512, "depth": 8, "token_hidden": 256, "channel_hidden": 2048}
SMALL = {"patch_size": 4, "tokens": 4, "channels": 8, "depth": 1, "expansion": 1.0}
_FOREVER = 1 << 40  # steps, none of which is the last

Stretch = Callable[[int], None]  # trains for so many steps


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    gpu = torch.cuda.is_available()
    here = Topology(0, 1, 0, 1, torch.device("cuda", 0) if gpu else torch.device("cpu"))
    batch = arguments.batch or (256 if gpu else 1)
    every = LogSection().every
    contests: list[tuple[str, dict[str, Any], int, int, int]] = [  # name, model, side, steps a turn, rounds
        ("Mixer-S/16", S16, 224, 10 if gpu else 1, arguments.rounds),
        ("a tiny network", SMALL, 8, every, 20 * arguments.rounds),
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        store = topology.start(here, timeout=600)
        stack.callback(topology.stop)
        rows = []
        for name, model, side, turn, rounds in contests:
            recipe = recipe_of(model, side, batch, "bf16" if gpu else "fp32")
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            turns = take_turns(recipe, here, store, folder, turn, rounds * every // turn)
            times = {who: np.reshape(found, (rounds, -1)).sum(axis=1).tolist() for who, found in turns.items()}
            rows += _rows(times, name, batch, here, every)
        return rows


def recipe_of(model: dict[str, Any], side: int, batch: int, precision: str, **log: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "data": {"path": "memory", "num_classes": 1000, "image_size": side},
            "model": {"kind": "mixer", **model},
            "optim": {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 1.0},
            "train": {"epochs": 1, "global_batch": batch, "precision": precision},
            "log": {"images": 0, **log},
        }
    )


class _Over(Exception):
    """All turns have been taken."""


class Turns:
    """Stands where the loader does, and takes the time: before each stretch of the loop the others have theirs."""

    steps = _FOREVER  # of an epoch
    waited = 0.0

    def __init__(self, batch: Batch, others: dict[str, Stretch], length: int, turns: int):
        self._batch, self._others, self._length = batch, others, length
        self._left = turns + 1  # the first allocates, and is not counted
        self._taken, self._began = 0, 0.0
        self.times: dict[str, list[float]] = {name: [] for name in (*others, LOOP)}

    def batches(self, epoch: int, first_step: int) -> "Turns":
        return self

    def __enter__(self) -> "Turns":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> "Turns":
        return self

    def __next__(self) -> Batch:
        if self._taken % self._length == 0:
            self._turn()
        self._taken += 1
        return self._batch

    def _turn(self) -> None:
        now = _clock()
        if self._taken:
            self.times[LOOP].append(now - self._began)
        if self._left == 0:
            raise _Over
        self._left -= 1
        for name, other in self._others.items():
            began = _clock()
            other(self._length)
            self.times[name].append(_clock() - began)
        self._began = _clock()


def _clock() -> float:
    """Seconds: of the GPU's work, or of this process's on a CPU, where others' work would disturb a wall's clock."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def take_turns(
    recipe: Recipe, here: Topology, store: torch.distributed.Store, folder: Path, length: int, turns: int
) -> dict[str, list[float]]:
    """Seconds that each contestant took for each of its turns, of `length` steps."""
    numbers = torch.Generator().manual_seed(0)
    batch, side = recipe.train.global_batch, recipe.data.image_size
    inputs = torch.randn(batch, 3, side, side, generator=numbers).contiguous(memory_format=torch.channels_last)
    targets = torch.rand(batch, recipe.data.num_classes, generator=numbers).softmax(dim=1)
    data = Batch(inputs.to(here.device), targets.to(here.device), np.arange(batch))
    schedule = build_schedule(recipe.schedule, recipe.optim.lr, _FOREVER, 1)

    def network() -> nn.Module:
        torch.manual_seed(0)
        return build_model(recipe.model, side, recipe.data.num_classes).to(here.device)

    def engine() -> Engine:
        return build_engine(recipe.engine, network(), recipe.optim, recipe.train, here)

    others = {PLAIN: _plain(network(), data, schedule, recipe), ENGINE: _engine_alone(engine(), data, schedule)}
    loader = Turns(data, others, length, turns)
    with ExitStack() as stack:
        watch = stack.enter_context(Watch(folder, here, store.clone(), 3600))
        stop = stack.enter_context(StopRequest())
        record = Record(folder, 0, recipe.log.tensorboard)
        stack.callback(record.close)
        run = Run(
            recipe=recipe,
            topology=here,
            engine=engine(),
            train=cast(TrainLoader, loader),
            evaluation=cast(EvalLoader, None),  # nothing is evaluated: the run never comes to its end
            schedule=schedule,
            record=record,
            progress=Progress(False, 0, _FOREVER),
            saver=Saver(folder, here, store.clone(), RetentionPolicy(1)),
            rollback=Rollback(folder, here, 0, []),
            watch=watch,
            last=_FOREVER,
        )
        loop = Loop(run, 0, 0, 0.0, stop)
        with suppress(_Over):
            loop.fit()
            raise KeyboardInterrupt  # which the loop takes for a wish to stop
        loop.agreement.finish()
    return {name: times[1:] for name, times in loader.times.items()}


def _plain(module: nn.Module, batch: Batch, schedule: Callable[[int], float], recipe: Recipe) -> Stretch:
    """What any script would do. Of ours it has the network and the learning rates."""
    optim, half = recipe.optim, recipe.train.precision == "bf16"
    device = batch.inputs.device
    decayed = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, weight_decay=optim.weight_decay, fused=device.type == "cuda")
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    done = 0

    def train(steps: int) -> None:
        nonlocal done
        model.train()
        for _ in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = schedule(done)
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                logits = model(batch.inputs)
            loss = nn.functional.cross_entropy(logits.float(), batch.targets)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), cast(float, optim.clip_grad))
            optimizer.step()
            optimizer.zero_grad()
            done += 1

    return train


def _engine_alone(engine: Engine, batch: Batch, schedule: Callable[[int], float]) -> Stretch:
    done = 0

    def train(steps: int) -> None:
        nonlocal done
        for _ in range(steps):
            engine.step([batch], schedule(done))
            done += 1

    return train


def _rows(
    times: dict[str, list[float]], network: str, batch: int, here: Topology, steps: int
) -> list[dict[str, Any]]:
    """Medians over rounds of `steps`; `ratio` of speeds and `us_more` a step are those of the pairs in a round."""
    rate = "images_per_s" if here.device.type == "cuda" else "images_per_cpu_s"
    return [
        {
            "name": f"{name}, {network}",
            rate: round(batch * steps / statistics.median(found), 1),
            "ratio": round(statistics.median(b / a for a, b in zip(found, times[PLAIN], strict=True)), 4),
            "us_more": round(
                1e6 / steps * statistics.median(a - b for a, b in zip(found, times[PLAIN], strict=True))
            ),
            "memory_gb": round(peak_memory(here.device), 2),  # of all three together
        }
        for name, found in times.items()
    ]
