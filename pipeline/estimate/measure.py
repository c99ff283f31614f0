"""`widemix cost --measure` and `train --dry-run`: time a pass of a recipe's network on this machine."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from widemix.cgroups import usable_cpus
from widemix.data.loader import TrainLoader
from widemix.data.precision import DTYPES, autocast
from widemix.distributed.topology import Topology, read_topology
from widemix.engine.memory_layout import choose_memory_layout, use_memory_layout
from widemix.estimate.fake import fake_inputs, prepare_to_train, unused_of
from widemix.estimate.hardware import Gpu
from widemix.estimate.network import Pass
from widemix.models.cost import model_cost
from widemix.models.registry import build_model
from widemix.recipe import Recipe
from widemix.recipe.losses import LOSSES
from widemix.recipe.sections import EngineSection

REPEATS = 3
_MOST_S = 0.5  # of a product of two matrices on a CPU


def measured_peaks(device: torch.device) -> Gpu:
    """Measure the peaks of this machine: a matrix product in bf16 and in fp32, and a copy larger than caches."""
    peaks = []
    for dtype in (torch.bfloat16, torch.float32):
        side = product_side(dtype, device)
        peaks.append(2 * side**3 / _product_seconds(side, dtype, device))
    source = torch.zeros(1 << 26, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / shortest(lambda: target.copy_(source), device)
    return Gpu(peaks[0], peaks[1], 0, bandwidth, 0)


def product_side(dtype: torch.dtype, device: torch.device) -> int:
    """Return the side of two square matrices that is large enough for their product to reach the device's peak.

    On a CPU at most 2048, and less where a product takes long: without instructions for bf16 that would be a minute.
    """
    if device.type == "cuda":
        return 8192
    side = 256
    while side < 2048 and 8 * _product_seconds(side, dtype, device) < _MOST_S:
        side *= 2
    return side


def _product_seconds(side: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return shortest(lambda: a @ b, device)


def measured_pass(
    recipe: Recipe, micro: int, device: torch.device, engine: EngineSection | None = None
) -> tuple[float, int | None]:
    """Run forward, loss and backward of `micro` samples; in the memory layout that `engine` asks for.

    Returns seconds, and on a GPU the peak of memory in bytes, without weights and inputs; else None.
    """
    torch.manual_seed(recipe.train.seed)
    module = build_model(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    prepare_to_train(module, recipe.train, device, unused_of(recipe, module))
    module.to(device)
    if engine:
        use_memory_layout(module, choose_memory_layout(module, engine, recipe.train, micro, device))
    inputs = fake_inputs(recipe, micro).to(device)
    targets = torch.full((micro, recipe.data.num_classes), 1 / recipe.data.num_classes, device=device)

    def run_pass() -> None:
        with autocast(device, DTYPES[recipe.train.precision]):
            logits = module(inputs)
        LOSSES[recipe.train.loss].build()(logits, targets).backward()
        module.zero_grad(set_to_none=True)

    run_pass()
    if device.type != "cuda":
        return shortest(run_pass, device), None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_pass()
    peak = torch.cuda.max_memory_allocated(device) - before
    return shortest(run_pass, device), peak


def compare(recipe: Recipe, network: Pass, micro: int) -> tuple[float, float, int | None]:
    """Return seconds of the roofline with this machine's peaks, measured seconds, and on a GPU measured bytes.

    network: the pass of `micro` samples, with the recipe's engine set to DDP.
    """
    device = read_topology().device
    return network.seconds(measured_peaks(device)), *measured_pass(recipe, micro, device)


def shortest(action: Callable[[], object], device: torch.device) -> float:
    """The shortest time of some repetitions, s: other load of the machine only makes them longer."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)


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
