"""`widemix train --dry-run`: what a run takes on this machine, from a timed pass and a timed batch."""

import time
from typing import NamedTuple

import torch

from widemix.cgroups import usable_cpus
from widemix.data.loader import TrainLoader
from widemix.distributed.topology import Topology
from widemix.estimate.measure import measured_pass
from widemix.models.cost import model_cost
from widemix.recipe import Recipe

_FLOPS = 2e10  # of the pass that is timed, if one sample has less: half a second of a slow CPU


class Timing(NamedTuple):
    """Seconds of the whole run's parts, over all ranks, which share this machine."""

    samples: int  # of the pass that was timed
    step: float  # with its batch
    loading: float  # of a step's samples
    run: float  # all steps; without start, evaluations and checkpoints


def time_run(recipe: Recipe, loader: TrainLoader, topology: Topology) -> Timing:
    """Time loading a batch of `loader`, which has been used before, and a pass of some samples.

    On a CPU loading and computing share the cores, so that a step takes both; on GPUs it takes the longer one.
    """
    train, world = recipe.train, topology.world
    flops = model_cost(recipe.model, recipe.data.image_size, recipe.data.num_classes).training_flops
    samples = max(1, min(int(_FLOPS / flops), train.micro_batch_size(world)))
    eager = recipe.model_copy(update={"train": train.model_copy(update={"compile": False})})
    seconds, _ = measured_pass(eager, samples, topology.device, recipe.engine)
    began = time.perf_counter()
    with loader.batches(epoch=0) as batches:
        next(batches)
    loading = (time.perf_counter() - began) * world  # the ranks of this machine divide its CPUs
    computing = seconds / samples * train.global_batch
    gpu = topology.device.type == "cuda"
    step = max(loading / world, computing / world) if gpu else loading + computing
    epochs = loader.steps * train.epochs
    return Timing(samples, step, loading, step * min(epochs, train.max_steps or epochs))


def describe_timing(recipe: Recipe, timing: Timing, device: torch.device) -> str:
    """Return the times as a sentence."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {usable_cpus()} cores"
    rate = recipe.train.global_batch / timing.step
    return (
        f"on this machine ({where}): about {_duration(timing.run)} for all steps, {rate:,.0f} samples/s, a step "
        f"{_duration(timing.step)} (from a pass of {timing.samples} samples and one batch)"
    )


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"
