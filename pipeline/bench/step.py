"""The training loop against a textbook loop of forty lines, on Mixer-S/16, with batches in memory.

Both train with DDP and AdamW, clip gradients, and follow the schedule; on a GPU in bf16, on a CPU in fp32 on one
thread. The whole loop also seeds, checks for signals and failed steps, and writes metrics.jsonl at the default
interval: a round is the steps from one line to the next, and the contestants divide it into short turns. A second,
tiny network shows the overhead per step in microseconds, where no arithmetic hides it.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from widemix.bench.network_step import measure_networks
from widemix.bench.timing import Contestant, compute_clock, time_in_turns
from widemix.cli.commands import load_from_arguments
from widemix.data.batches import Batch
from widemix.distributed.requests import SharedRequests, StopRequest
from widemix.distributed.topology import Topology, process_group
from widemix.distributed.watchdog import Watchdog
from widemix.engine import Engine, build_engine
from widemix.models.registry import build_model
from widemix.recipe import Recipe
from widemix.run.checkpoint import RetentionPolicy
from widemix.run.log import RunLog
from widemix.run.metrics import peak_memory
from widemix.run.resume import ResumeState
from widemix.run.run_dir import Run
from widemix.run.saving import Saver
from widemix.training.faults import Rollback
from widemix.training.loop import Loop
from widemix.training.schedule import Schedule, build_schedule

VERSIONS = ("torch", "timm")
PLAIN, ENGINE, LOOP = "plain loop", "our engine alone", "our whole loop"
S16 = {"patch_size": 16, "channels": 512, "depth": 8, "token_hidden": 256, "channel_hidden": 2048}
SMALL = {"patch_size": 4, "channels": 8, "depth": 1, "expansion": 1.0}
_MANY = 1 << 40  # steps of an epoch and of the run, whose ends the benchmark never reaches


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of `widemix bench step`, or with a recipe those of its network."""
    gpu = torch.cuda.is_available()
    if arguments.recipe is not None:
        device = torch.device("cuda", 0) if gpu else torch.device("cpu")
        recipe = load_from_arguments(arguments)
        batch = arguments.batch or recipe.train.global_batch
        return measure_networks(recipe, batch, arguments.rounds, arguments.compiled, device)
    topology = Topology(0, 1, 0, 1, torch.device("cuda", 0) if gpu else torch.device("cpu"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        stack.enter_context(process_group(topology, timeout_s=600))
        rows = []
        for name, recipe, steps, rounds in contests(gpu, arguments.batch, arguments.rounds):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            rows += compare_loops(name, recipe, topology, folder, steps, rounds)
        return rows


def contests(gpu: bool, batch: int | None, rounds: int) -> list[tuple[str, Recipe, int, int]]:
    """Return what is compared: a name, its recipe, the steps of a turn, and the rounds."""
    size, precision = (256, "bf16") if gpu else (1, "fp32")
    large, tiny = (make_recipe(model, side, batch or size, precision) for model, side in ((S16, 224), (SMALL, 8)))
    return [
        ("Mixer-S/16", large, 10 if gpu else 1, rounds),
        ("a tiny network", tiny, tiny.log.every, 20 * rounds),
    ]


def compare_loops(
    name: str, recipe: Recipe, topology: Topology, folder: Path, steps: int, rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each contestant, of rounds of `log.every` steps in turns of `steps`."""
    turns = time_contestants(recipe, topology, folder, steps, rounds * recipe.log.every // steps)
    seconds = {contestant: np.reshape(own, (rounds, -1)).mean(axis=1).tolist() for contestant, own in turns.items()}
    return rows_of(seconds, name, recipe.train.global_batch, topology)


def make_recipe(model: dict[str, Any], side: int, batch: int, precision: str, **log: Any) -> Recipe:
    """Return a recipe for a Mixer on images of `side` pixels, whose batches never come from a folder."""
    return Recipe.model_validate(
        {
            "data": {"path": "memory", "num_classes": 1000, "image_size": side},
            "model": {"kind": "mixer", **model},
            "optim": {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 1.0},
            "train": {"epochs": 1, "global_batch": batch, "precision": precision},
            "log": {"images": 0, **log},
        }
    )


def time_contestants(
    recipe: Recipe, topology: Topology, folder: Path, steps: int, turns: int
) -> dict[str, list[float]]:
    """Return the seconds per step of each contestant in each of its turns, which have `steps` steps.

    The first turn is not counted. The whole loop writes its run folder to `folder`.
    """
    generator = torch.Generator().manual_seed(0)
    batch, side, device = recipe.train.global_batch, recipe.data.image_size, topology.device
    inputs = torch.randn(batch, 3, side, side, generator=generator).contiguous(memory_format=torch.channels_last)
    targets = torch.rand(batch, recipe.data.num_classes, generator=generator).softmax(dim=1)
    data = Batch(inputs.to(device), targets.to(device), np.arange(batch))
    schedule = Schedule(_MANY, _MANY, build_schedule(recipe.schedule, recipe.optim.lr, _MANY, 1))

    def network() -> nn.Module:
        torch.manual_seed(0)
        return build_model(recipe.model, side, recipe.data.num_classes).to(device)

    def engine() -> Engine:
        return build_engine(recipe.engine, network(), recipe.optim, recipe.train, topology)

    plain, alone = _plain_loop(network(), data, schedule, recipe), _engine_alone(engine(), data, schedule)
    with ExitStack() as stack:
        loop = _build_loop(recipe, engine(), schedule, topology, folder, stack)

        def whole_loop(steps: int) -> None:
            stopped = loop.advance(repeat(data), steps)
            assert not stopped

        trainers = {PLAIN: plain, ENGINE: alone, LOOP: whole_loop}
        contestants: dict[str, Contestant] = {name: partial(_turn, train, steps) for name, train in trainers.items()}
        times = time_in_turns(contestants, turns, partial(compute_clock, device))
        loop.requests.finish()
    return times


def _turn(train: Callable[[int], None], steps: int, _number: int) -> int:
    """A contestant's turn: it trains for `steps` steps."""
    train(steps)
    return steps


def _build_loop(
    recipe: Recipe, engine: Engine, schedule: Schedule, topology: Topology, folder: Path, stack: ExitStack
) -> Loop:
    """Build the loop as `widemix.trainer` does; it is never evaluated or saved, as its run has no end."""
    store = torch.distributed.HashStore()

    def evaluate() -> dict[str, float]:
        raise AssertionError("the run has no end to evaluate at")

    run = Run(recipe, topology, ResumeState(folder), store, stack.enter_context(StopRequest()))
    return Loop(
        run,
        engine,
        schedule,
        evaluate,
        log=stack.enter_context(RunLog(run, _MANY, quiet=True)),
        saver=Saver(folder, topology, store, RetentionPolicy(1)),
        rollback=Rollback(folder, topology, 0, []),
        watchdog=stack.enter_context(Watchdog(folder, topology, store, 3600)),
        requests=SharedRequests(topology, store),
    )


def _plain_loop(module: nn.Module, batch: Batch, schedule: Schedule, recipe: Recipe) -> Callable[[int], None]:
    """Return a plain training loop; of widemix it uses the network and the learning rates alone."""
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
                group["lr"] = schedule.lr(done)
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                logits = model(batch.inputs)
            loss = nn.functional.cross_entropy(logits.float(), batch.targets)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), cast(float, optim.clip_grad))
            optimizer.step()
            optimizer.zero_grad()
            done += 1

    return train


def _engine_alone(engine: Engine, batch: Batch, schedule: Schedule) -> Callable[[int], None]:
    done = 0

    def train(steps: int) -> None:
        nonlocal done
        for _ in range(steps):
            engine.step([batch], schedule.lr(done))
            done += 1

    return train


def rows_of(seconds: dict[str, list[float]], network: str, batch: int, topology: Topology) -> list[dict[str, Any]]:
    """Return medians over rounds; `ratio` of speeds and `us_more` a step compare the turns of the same round."""
    rate = "images_per_s" if topology.device.type == "cuda" else "images_per_cpu_s"
    pairs = {name: list(zip(own, seconds[PLAIN], strict=True)) for name, own in seconds.items()}
    return [
        {
            "name": f"{name}, {network}",
            rate: round(batch / statistics.median(own), 1),
            "ratio": round(statistics.median(b / a for a, b in pairs[name]), 4),
            "us_more": round(1e6 * statistics.median(a - b for a, b in pairs[name])),
            "memory_gib": round(peak_memory(topology.device), 2),  # of all three together
        }
        for name, own in seconds.items()
    ]
