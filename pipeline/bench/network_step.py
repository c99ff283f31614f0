"""A training step of a recipe's network by its parts, beside those without random permutations and by PyTorch alone.

All contestants take the same plain loop: forward pass in the recipe's precision, backward pass, AdamW, with one batch
in memory, no engine and no data. They take turns of one step in one process. The FLOPs of the products, as PyTorch
counts those that this device computes, are compared with what a product of two square matrices of this precision
reaches on it in the same process (the fraction of the peak), and with the GPU's data sheet (model FLOPs utilisation,
MFU).
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast, get_args

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from widemix.bench.timing import compute_clock
from widemix.distributed.topology import keep_freed_memory, set_matmul_precision
from widemix.engine.memory_layout import choose_memory_layout, layout_blocks, use_memory_layout
from widemix.errors import InputError
from widemix.estimate.fake import MemoryTracker
from widemix.estimate.hardware import stated_peak
from widemix.estimate.measure import product_side
from widemix.models.registry import build_model
from widemix.recipe import Recipe
from widemix.training.profile import torch_profiler

_LISTED = 12  # operations; the others are added up


def time_by_operation(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Return the milliseconds of each operation in one call of `step`, the longest first and the shortest as "other".

    On a GPU these are its kernels; on a CPU PyTorch's operators, without what they call.
    """
    gpu = device.type == "cuda"
    with torch_profiler() as profiler:
        step()
        if gpu:
            torch.cuda.synchronize(device)
    times: Counter[str] = Counter()
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if gpu else event.self_cpu_time_total
        if microseconds and (event.device_type == torch.autograd.DeviceType.CUDA) == gpu:
            times[event.key] += microseconds / 1e3
    listed = times.most_common(_LISTED)
    rest = times.total() - sum(time for _, time in listed)
    return {name: round(time, 3) for name, time in [*listed, *([("other", rest)] if len(times) > _LISTED else [])]}


def peak_memory(
    step: Callable[[], object], network: nn.Module, others: Iterable[torch.Tensor], device: torch.device
) -> float | None:
    """Return the most GiB of tensors that are alive at once in a call of `step`.

    None on a CPU for a compiled network, whose buffers are unknown. others: tensors that are alive before it, beside
    those of the network.
    """
    own = [*network.parameters(), *network.buffers(), *others]
    if device.type == "cuda":  # where other networks may lie too
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        added = torch.cuda.max_memory_allocated(device) - before
        return round((added + sum(each.nbytes for each in own if each.is_cuda)) / 2**30, 3)
    if isinstance(network, torch._dynamo.eval_frame.OptimizedModule):
        return None
    with MemoryTracker() as tracker:
        tracker.watch(*own)
        step()
    return round(tracker.peak / 2**30, 3)


PARTS = ("forward", "backward", "optimizer")
PERMUTATIONS = {"normal": "commutation", "rp": "random"}  # of networks that have the key
_PEAK_TRIES = 10


@dataclass
class Contestant:
    """A network and its optimizer, and what its steps took."""

    name: str
    network: nn.Module
    optimizer: torch.optim.Optimizer
    memory_layout: str = "plain"
    seconds: list[list[float]] = field(default_factory=list)  # of each part, in each step
    memory_gib: float | None = None  # peak of a step, with weights and optimizer state
    operations_ms: dict[str, float] = field(default_factory=dict)  # of a step, the longest first


def measure_networks(recipe: Recipe, batch: int, rounds: int, compiled: bool, device: torch.device) -> list[dict]:
    """Return the rows of `widemix bench step RECIPE`; the first round of each contestant is not counted.

    Raises `InputError` for a network of text, or in float8.
    """
    if recipe.model.takes == "text":
        raise InputError(f"bench step: a network of kind {recipe.model.kind} takes no images")
    if recipe.train.fp8:
        raise InputError("bench step: its steps compute in train.precision, not in float8; set train.fp8 to false")
    keep_freed_memory(device)
    set_matmul_precision(recipe.train.matmul_precision)
    ours, alone = _networks(recipe, compiled)
    contestants = [_contestant(name, build, device) for name, build in ours.items()]
    inputs, targets = _batch(recipe, batch, device)
    with FlopCounterMode(display=False) as counter:  # of plain blocks: it does not see products inside our kernels
        _step(contestants[0], inputs, targets, recipe.train.precision)
    for contestant in contestants:
        if layout_blocks(contestant.network):
            contestant.memory_layout = choose_memory_layout(
                contestant.network, recipe.engine, recipe.train, batch, device
            )
            use_memory_layout(contestant.network, contestant.memory_layout)
    if contestants[0].memory_layout == "plain":  # it is PyTorch's alone
        alone.pop(f"{contestants[0].name} eager")
    contestants += [_contestant(name, build, device) for name, build in alone.items()]
    for number in range(rounds + 1):
        for contestant in contestants:
            seconds = _step(contestant, inputs, targets, recipe.train.precision)
            if number:  # the first one compiles and allocates
                contestant.seconds.append(seconds)
    for contestant in contestants:
        step = partial(_step, contestant, inputs, targets, recipe.train.precision)
        state = [value for values in contestant.optimizer.state.values() for value in values.values()]
        contestant.memory_gib = peak_memory(step, contestant.network, [*state, inputs, targets], device)
        contestant.operations_ms = time_by_operation(step, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peaks = measure_peak(recipe.train.precision, device), stated_peak(recipe.train, name)
    return [
        row_of(contestant, contestants[0], batch, counter.get_total_flops(), peaks, device)
        for contestant in contestants
    ]


Networks = dict[str, Callable[[], nn.Module]]


def _networks(recipe: Recipe, compiled: bool) -> tuple[Networks, Networks]:
    """Makers of networks with blocks by the chosen layout, first the one to compare with; and PyTorch's alone."""
    section, size = recipe.model, (recipe.data.image_size, recipe.data.num_classes)
    if "drop_path" in type(section).model_fields:
        section = section.model_copy(update={"drop_path": 0.0})  # timm's has none
    ours: Networks = {"network": partial(build_model, section, *size)}
    key = type(section).model_fields.get("permutation")
    if key is not None and {*PERMUTATIONS.values()} <= {*get_args(key.annotation)}:
        ours = {
            name: partial(build_model, section.model_copy(update={"permutation": kind}), *size)
            for name, kind in PERMUTATIONS.items()
        }
    first, build = next(iter(ours.items()))
    alone = {f"{first} eager": build}
    if timms := section.timm_twin(*size):
        alone["timm eager"] = timms
    if compiled:
        each = ours | ({"timm": timms} if timms else {})
        alone |= {f"{name} compiled": partial(_compile, build) for name, build in each.items()}
    return ours, alone


def _compile(build: Callable[[], nn.Module]) -> nn.Module:
    return cast(nn.Module, torch.compile(build()))


def _contestant(name: str, build: Callable[[], nn.Module], device: torch.device) -> Contestant:
    torch.manual_seed(0)
    network = build().to(device).train()
    return Contestant(name, network, torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True))


def _batch(recipe: Recipe, batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    side, classes = recipe.data.image_size, recipe.data.num_classes
    inputs = torch.randn(batch, 3, side, side, generator=generator).contiguous(memory_format=torch.channels_last)
    return inputs.to(device), torch.rand(batch, classes, generator=generator).softmax(dim=1).to(device)


def _step(contestant: Contestant, inputs: torch.Tensor, targets: torch.Tensor, precision: str) -> list[float]:
    """One training step; returns the seconds of each part."""
    device = inputs.device
    clock = partial(compute_clock, device)
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    times = [clock()]
    with torch.autocast(device.type, dtype, enabled=precision != "fp32"):
        logits = contestant.network(inputs)
    loss = nn.functional.cross_entropy(logits.float(), targets)
    times.append(clock())
    loss.backward()
    times.append(clock())
    contestant.optimizer.step()
    contestant.optimizer.zero_grad()
    times.append(clock())
    return [ended - began for began, ended in itertools.pairwise(times)]


def measure_peak(precision: str, device: torch.device) -> float:
    """FLOPs a second of the product of two square matrices, the best of some tries."""
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    side = product_side(dtype, device)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(_PEAK_TRIES):
        began = compute_clock(device)
        torch.mm(left, right)
        best = min(best, compute_clock(device) - began)
    return 2 * side**3 / best


def row_of(
    contestant: Contestant,
    first: Contestant,
    batch: int,
    flops: int,
    peaks: tuple[float, float | None],
    device: torch.device,
) -> dict[str, Any]:
    """The row of a contestant: medians over the rounds; `time_ratio` to the first one's step of the same round.

    peaks: FLOPs a second, measured and on the data sheet.
    """
    measured, stated = peaks
    own, others = (list(map(sum, each.seconds)) for each in (contestant, first))
    parts = zip(PARTS, zip(*contestant.seconds, strict=True), strict=True)
    seconds = statistics.median(own)
    return {
        "name": contestant.name,
        "memory_layout": contestant.memory_layout,
        "images_per_s" if device.type == "cuda" else "images_per_cpu_s": round(batch / seconds, 1),
        "time_ratio": round(statistics.median(a / b for a, b in zip(own, others, strict=True)), 4),
        **{f"{part}_ms": round(1e3 * statistics.median(times), 3) for part, times in parts},
        "tflop_per_s": round(flops / seconds / 1e12, 4),
        "peak_fraction": round(flops / seconds / measured, 4),
        "mfu": round(flops / seconds / stated, 4) if stated else None,
        "memory_gib": contestant.memory_gib,
        "operations_ms": contestant.operations_ms,
    }
