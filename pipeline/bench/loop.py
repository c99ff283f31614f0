"""A recipe's whole training on its prepared data, beside its bare step: what the loader and the loop add to a step.

The whole is `widemix train` itself, timed by the lines of its metrics.jsonl. The bare step is forward and backward
pass and optimizer on a batch in memory. They take turns, each round a run of its own. With a step's time given no
network is computed: a device is imitated, which is busy so long with each step, while its host goes on to the next.
The host waits where that of a GPU would: before it is two steps ahead, and where a line of the log reads the losses.
So a machine without a GPU shows whether it would keep one busy.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from widemix.bench.scale import WARMUP, build_network, plain_step
from widemix.bench.timing import elapsed
from widemix.cli.commands import load_from_arguments
from widemix.data.loader import TrainLoader
from widemix.distributed.topology import Topology, process_group, read_topology, set_torch_threads
from widemix.models.section import ModelSection
from widemix.recipe import Recipe
from widemix.run.records import read_lines

VERSIONS = ("torch", "numpy")
_NEVER = 1 << 30  # epochs, steps


class TimedSection(ModelSection):
    """A network in whose place a time passes, in milliseconds."""

    kind: Literal["timed"] = "timed"
    step_ms: float
    launch_ms: float  # CPU time of the host, which starts operators

    def build(self, image_size: int, num_classes: int) -> nn.Module:
        """Return the network, of a few weights."""
        return _Timed(self.step_ms / 1e3, self.launch_ms / 1e3, num_classes)


class _Timed(nn.Module):
    free_at = 0.0  # when the device has ended the last step

    def __init__(self, step: float, launch: float, num_classes: int):
        super().__init__()
        self._step, self._launch = step, launch
        self.head = nn.Linear(3, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, H, W] -> logits [B, classes] of a pixel, once the device has ended the step before."""
        self.synchronize()
        _Timed.free_at = time.perf_counter() + self._step
        launched = time.thread_time() + self._launch
        few = images.new_zeros(16, dtype=torch.float32)
        while time.thread_time() < launched:
            few.add_(1)
        with torch.autocast(images.device.type, enabled=False):  # a CPU may be slow in bf16
            return self.head(images[:, :, 0, 0].float())

    @classmethod
    def synchronize(cls) -> None:
        """Wait, without Python's lock, until the device has nothing to do."""
        time.sleep(max(0.0, cls.free_at - time.perf_counter()))


class _Enough(Exception):
    """The steps that are timed are over."""


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of `widemix bench loop`."""
    recipe = load_from_arguments(arguments)
    if arguments.step_ms is not None:
        section = TimedSection(step_ms=arguments.step_ms, launch_ms=arguments.launch_ms)
        recipe = recipe.model_copy(update={"model": section})
    with tempfile.TemporaryDirectory() as name:
        return measure_loop(recipe, arguments.rounds, arguments.lines, arguments.to or Path(name))


def measure_loop(recipe: Recipe, rounds: int, lines: int, folder: Path) -> list[dict[str, Any]]:
    """Return a row for the bare step and one for the whole, of medians over rounds.

    A round is the steps of `lines` lines of the log after the first, and as many bare ones; `ratio` of speeds is
    computed within it. The runs are kept in the folder.
    """
    topology = read_topology()
    set_torch_threads(topology)
    bare: list[float] = []
    whole: list[dict[str, float]] = []
    for number in range(rounds):
        with process_group(topology, recipe.engine.timeout_s):
            step = _bare_step(recipe, topology)
            bare.append(statistics.median(elapsed(step, topology.device) for _ in range(lines * recipe.log.every)))
        whole.append(_whole_step(recipe, lines, folder / f"round-{number}"))
    return [
        _row("bare step", recipe, bare, bare, [0.0]),
        _row("loader and loop", recipe, [each["step"] for each in whole], bare, [each["wait"] for each in whole]),
    ]


def _row(name: str, recipe: Recipe, seconds: list[float], bare: list[float], waits: list[float]) -> dict[str, Any]:
    return {
        "name": name,
        "images_per_s": round(recipe.train.global_batch / statistics.median(seconds), 1),
        "step_ms": round(1e3 * statistics.median(seconds), 3),
        "ratio": round(statistics.median(own / other for own, other in zip(bare, seconds, strict=True)), 4),
        "data_wait_ms": round(1e3 * statistics.median(waits), 3),
        "samples": seconds,
    }


def _bare_step(recipe: Recipe, topology: Topology) -> Callable[[], object]:
    """A step on batches that are in memory, which has been called some times before."""
    loader = TrainLoader(recipe.data, recipe.augment, recipe.train, topology)
    with loader.batches(0) as batches:
        kept = list(islice(batches, recipe.train.grad_accum_steps))
    step = plain_step(recipe, build_network(recipe, topology)[0], kept, topology)
    for _ in range(WARMUP):
        step()
    return step


def _whole_step(recipe: Recipe, lines: int, folder: Path) -> dict[str, float]:
    """Seconds of a step, and of its wait for data, in the lines after the first."""
    from widemix.trainer import train

    ends = {"epochs": _NEVER, "save_every_steps": _NEVER, "save_minutes": None}
    recipe = recipe.model_copy(
        update={
            "train": recipe.train.model_copy(update=ends),
            "eval": recipe.eval.model_copy(update={"every_epochs": _NEVER, "every_minutes": None}),
        }
    )
    left = [(1 + lines) * recipe.log.every]

    def stepped(*_: object) -> None:
        if left[0] == 0:
            raise _Enough
        left[0] -= 1
        if left[0] % recipe.log.every == 0:
            _Timed.synchronize()

    with register_optimizer_step_post_hook(stepped), suppress(_Enough):
        train(recipe, folder, "never", Path("loop.yaml"), verbosity=-1)
    found = [line for line in read_lines(folder / "metrics.jsonl") if line["split"] == "train"][1 : 1 + lines]
    speed = statistics.harmonic_mean([line["images_per_s"] for line in found])
    step = recipe.train.global_batch / speed
    return {"step": step, "wait": step * statistics.fmean(line["data_wait"] for line in found)}
