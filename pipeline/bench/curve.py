"""How many images a second a loader gives on any number of threads, from what its stages take on one.

The stages of the recipe's loader are measured, by CPU time. The model simulates `widemix.data.batches`: some batches
are read at once; each is Python, then a task for each thread that decodes, and when the last has ended one that
augments. Python, and the start of a task, is one thing at a time. Finishing, which a GPU does itself, has a thread of
its own. Not in it: the bandwidth of memory, and processors that are slower when all of their cores work. For as many
threads as there are processors, reading is timed beside it.
"""

import argparse
import heapq
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from widemix.cgroups import usable_cpus
from widemix.cli.commands import load_from_arguments
from widemix.data.batches import StepPart, prefetch
from widemix.data.compiled import run_on_threads
from widemix.data.images import AugmentedImages
from widemix.data.loader import TrainLoader
from widemix.data.mixup import sample_mixture
from widemix.data.normalise_and_mix import normalise_and_mix, per_channel
from widemix.data.precision import DTYPES
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.recipe import Recipe
from widemix.recipe.data import DataSection

VERSIONS = ("torch", "numba", "numpy")
THREADS = (1, 2, 4, 8, 16, 32, 64)
_BATCHES = 40  # of a simulation


@dataclass(frozen=True)
class Stages:
    """Seconds of the stages of a batch, on one thread."""

    decode: Sequence[float]  # of each image
    augment: float  # of all images
    python: float  # of reading, everything else
    task: float  # of the start of a task, in Python
    finish: float  # of all images, divided among the threads
    alone: float  # of all images, by one thread
    ahead: int  # batches that are read ahead

    def images_per_s(self, threads: int, finishing: bool = True) -> float:
        """Return the model's speed on so many threads; without `finishing` that of reading, as for a GPU."""
        workers, python, finisher = [0.0] * threads, 0.0, 0.0
        at_once = min(threads, self.ahead)
        waiting = [(0.0, number, "read") for number in range(at_once)]
        decode = [sum(self.decode[k::threads]) for k in range(threads)]

        def run(tasks: Sequence[float], ready: float) -> float:
            """When the last of the tasks has ended, each on the thread that is free first."""
            nonlocal python
            ends = []
            for seconds in tasks:
                ready = python = max(ready, python) + (self.task if threads > 1 else 0.0)
                ends.append(max(ready, heapq.heappop(workers)) + seconds)
                heapq.heappush(workers, ends[-1])
            return max(ends)

        while waiting:
            ready, number, stage = heapq.heappop(waiting)
            if stage == "read":
                ready = python = max(ready, python) + self.python
                heapq.heappush(waiting, (run(decode, ready), number, "decoded"))
                continue
            if stage == "decoded" and self.augment:
                heapq.heappush(waiting, (run([self.augment / threads] * threads, ready), number, "done"))
                continue
            if number + at_once < _BATCHES:
                heapq.heappush(waiting, (ready, number + at_once, "read"))
            if finishing:
                began = max(ready, finisher)
                parts = [self.finish / threads] * threads
                finisher = (run(parts, began) if threads > 1 else began + self.finish) + self.alone
        return _BATCHES * len(self.decode) / max(*workers, finisher)


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of `widemix bench curve`: one for each number of threads, with the times of the stages."""
    recipe = load_from_arguments(arguments)
    if recipe.model.takes == "text":
        raise InputError(f"bench curve: {arguments.recipe} loads no images")
    measured = {k: round(read_per_s(recipe, k), 1) for k in THREADS if k <= usable_cpus()}
    stages = measure_stages(recipe, arguments.rounds)
    own = {name: sum(value) if isinstance(value, Sequence) else value for name, value in vars(stages).items()}
    times = {f"{name}_us": round(1e6 * value / len(stages.decode), 2) for name, value in own.items()}
    return [
        {
            "name": f"{threads} thread{'s' * (threads > 1)}",
            "read_per_s": round(stages.images_per_s(threads, finishing=False), 1),
            "measured_per_s": measured.get(threads),
            "finished_per_s": round(stages.images_per_s(threads), 1),
            **times,
        }
        for threads in THREADS
    ]


def read_per_s(recipe: Recipe, threads: int) -> float:
    """Return how many images the recipe's loader reads in a second with so many threads, once it runs ahead."""
    loader = _loader(recipe, threads)
    reads = [partial(loader.source.read, StepPart(loader.order.step(0, 0)[: loader.micro_batch_size]))] * _BATCHES
    with prefetch(reads, loader.data, loader.source, loader.micro_batch_size) as hosts:
        ends = [time.perf_counter() for _ in hosts]
    ends = ends[_BATCHES // 4 :]  # what is ready before the first is asked for
    return loader.micro_batch_size * (len(ends) - 1) / (ends[-1] - ends[0])


def measure_stages(recipe: Recipe, rounds: int) -> Stages:
    """Return what the stages of the recipe's loader take: medians over rounds, in CPU time."""
    torch.set_num_threads(1)
    loader = _loader(recipe, 1)
    source = loader.source
    assert isinstance(source, AugmentedImages)
    data = loader.data
    assert isinstance(data, DataSection)
    ids = loader.order.step(0, 0)[: loader.micro_batch_size]
    samples, boxes, cubic = ids % len(loader), source.boxes(ids, 0), source.cubic(ids, 0)
    host = source.read(StepPart(ids))
    pixels, mix = host.inputs, recipe.augment.mixes_images

    def decode(part: slice) -> float:
        request = samples[part], boxes[part], cubic[part], pixels.numpy()[part]
        return _seconds(lambda: source.decoder.read(*request, threads=1), rounds)

    def finish(dtype: torch.dtype, erases: bool) -> float:
        mixture = sample_mixture(len(ids), pixels.shape[1], recipe.augment, 0, 0, 0) if mix else None
        erasing = source.erasing(ids, 0) if erases else None
        scale = per_channel(data.mean), per_channel(data.std)
        return _seconds(lambda: normalise_and_mix(pixels, *scale, dtype, erasing, mixture), rounds)

    every, each = decode(slice(None)), [decode(slice(b, b + 1)) for b in range(len(ids))]
    augment = _seconds(lambda: source.augmentation(pixels.numpy(), ids, 0, 0, 1), rounds)
    source.threads = 2  # so that the pixels are those of other threads
    python = _seconds(lambda: source.read(StepPart(ids)), rounds)
    parallel, finished = finish(torch.float32, erases=False), finish(DTYPES[recipe.train.precision], erases=True)
    return Stages(
        decode=[every * seconds / sum(each) for seconds in each],
        augment=augment,
        python=python,
        task=_seconds(lambda: run_on_threads(lambda k, n: None, 8), rounds, time.process_time) / 8,
        finish=parallel,
        alone=max(0.0, finished - parallel),
        ahead=data.prefetch_batches,
    )


def _loader(recipe: Recipe, threads: int) -> TrainLoader:
    data = recipe.data.model_copy(update={"workers": threads})
    return TrainLoader(data, recipe.augment, recipe.train, Topology(0, 1, 0, 1, torch.device("cpu")))


def _seconds(action: Callable[[], object], rounds: int, clock: Callable[[], float] = time.thread_time) -> float:
    times = []
    for _ in range(1 + rounds):
        began = clock()
        action()
        times.append(clock() - began)
    return statistics.median(times[1:])
