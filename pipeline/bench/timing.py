"""Timing: contestants that take turns in one process, so that a busy machine slows all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from widemix.data.images import View
from widemix.data.loader import TrainLoader
from widemix.distributed.topology import Topology
from widemix.progress_line import track
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection
from widemix.recipe.sections import TrainSection

# Takes the number of the round; returns how many units (images, calls, steps) it processed in it.
Contestant = Callable[[int], int]


def wall_clock(device: torch.device) -> float:
    """Return the wall clock in seconds, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def compute_clock(device: torch.device) -> float:
    """Return a clock in seconds that other processes disturb least.

    On a GPU the wall clock, as `wall_clock`; on a CPU the CPU time of all threads of this process.
    """
    return wall_clock(device) if device.type == "cuda" else time.process_time()


def elapsed(action: Callable[[], object], device: torch.device) -> float:
    """Return the wall-clock seconds of a call, the device's work included."""
    began = wall_clock(device)
    action()
    return wall_clock(device) - began


def time_in_turns(
    contestants: Mapping[str, Contestant],
    rounds: int,
    clock: Callable[[], float],
    warmup: int = 1,
    before: Callable[[], object] = lambda: None,
    shown: bool = True,
) -> dict[str, list[float]]:
    """Return the seconds per unit of each contestant in each round.

    In every round each contestant has one turn, in order. The first `warmup` rounds compile and allocate, and are not
    counted. `before` is called before each turn. `shown`: whether this process shows how far they are.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    turns = [(number, name) for number in range(warmup + rounds) for name in contestants]
    for number, name in track(turns, "turns timed", len(turns), "turns") if shown else turns:
        before()
        began = clock()
        units = contestants[name](number)
        if number >= warmup:
            seconds[name].append((clock() - began) / units)
    return seconds


def compare_loaders(contestants: Mapping[str, Contestant], rounds: int, peer: str) -> list[dict[str, Any]]:
    """Return a row for each contestant: `images_per_cpu_s`, and its `ratio` to the peer's.

    Both are medians over rounds, by CPU time of all threads of the process.
    """
    seconds = time_in_turns(contestants, rounds, time.process_time)
    return [
        {
            "name": name,
            "images_per_cpu_s": round(statistics.median(1 / value for value in own), 1),
            "ratio": round(_median_ratio(seconds[peer], own), 3),
        }
        for name, own in seconds.items()
    ]


def percent_longer(
    one: Contestant, other: Contestant, rounds: int, clock: Callable[[], float] = time.process_time
) -> float:
    """Return by how many percent a turn of `one` takes longer than one of `other`, the median over rounds.

    A round is a turn of `one`, two of `other` and one of `one`: a cost that the first turn has, or that grows with
    time, falls on both.
    """
    turns = time_in_turns({"one": one, "other": other, "other again": other, "one again": one}, rounds, clock)
    sums = (
        [sum(pair) for pair in zip(turns[name], turns[f"{name} again"], strict=True)] for name in ("one", "other")
    )
    return 100 * (_median_ratio(*sums) - 1)


def _median_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


@dataclass(frozen=True)
class Epochs:
    """A contestant that reads an epoch from each of its loaders; its units are samples."""

    loaders: Sequence[TrainLoader]

    def __call__(self, number: int) -> int:
        """Read the epoch of this number."""
        return sum(_samples(loader, number) for loader in self.loaders) // len(self.loaders)


def data_of(folder: Path, side: int, threads: int = 1) -> DataSection:
    """Return the data section of a prepared folder of ImageNet."""
    return DataSection(path=str(folder), num_classes=1000, image_size=side, workers=threads)


def training_loader(
    data: DataSection, augment: AugmentSection, batch: int, views: Sequence[View] = ()
) -> TrainLoader:
    """The training loader itself, prefetch thread and soft targets included."""
    train, topology = TrainSection(epochs=1, global_batch=batch), Topology(0, 1, 0, 1, torch.device("cpu"))
    return TrainLoader(data, augment, train, topology, views=views)


def _samples(loader: TrainLoader, epoch: int) -> int:
    with loader.batches(epoch) as batches:
        return sum(len(batch) for batch in batches)
