"""A real pass of the recipe's network on this machine, and the same roofline with this machine's own peaks."""

import time
from collections.abc import Callable

import torch

from pipeline.distributed.topology import read_topology
from pipeline.engine import prepare
from pipeline.engine.loss import DTYPES, LOSSES, autocast
from pipeline.estimate.fake import fake_inputs
from pipeline.estimate.hardware import Gpu
from pipeline.estimate.network import Pass
from pipeline.models.registry import build_model
from pipeline.recipe import Recipe

REPEATS = 3


def this_machine(device: torch.device) -> Gpu:
    """Its peaks, measured: a matrix product in fp32 and in bf16, and a copy that no cache holds."""
    side = 8192 if device.type == "cuda" else 2048
    peaks = []
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        peaks.append(2 * side**3 / _best(lambda a=a, b=b: a @ b, device))  # type: ignore[misc]
    source = torch.zeros(1 << 26, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _best(lambda: target.copy_(source), device)
    return Gpu(peaks[0], peaks[1], 0, bandwidth, 0)


def measured_pass(recipe: Recipe, micro: int, device: torch.device) -> tuple[float, int | None]:
    """Seconds of forward, loss and backward of `micro` samples; on a GPU bytes at most, beyond weights and inputs."""
    torch.manual_seed(recipe.train.seed)
    module = build_model(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    prepare(module, recipe.train)
    module.to(device)
    inputs = fake_inputs(recipe, micro).to(device)
    targets = torch.full((micro, recipe.data.num_classes), 1 / recipe.data.num_classes, device=device)

    def once() -> None:
        with autocast(device, DTYPES[recipe.train.precision]):
            logits = module(inputs)
        LOSSES[recipe.train.loss](logits, targets).backward()
        module.zero_grad(set_to_none=True)

    once()
    if device.type != "cuda":
        return _best(once, device), None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    once()
    peak = torch.cuda.max_memory_allocated(device) - before
    return _best(once, device), peak


def compare(recipe: Recipe, network: Pass, micro: int) -> tuple[float, float, int | None]:
    """Seconds of the roofline, seconds measured, and on a GPU bytes measured. The network in DDP's precision."""
    device = read_topology().device
    return network.seconds(this_machine(device)), *measured_pass(recipe, micro, device)


def _best(action: Callable[[], object], device: torch.device) -> float:
    """The shortest of some repetitions, seconds: what others do on the machine only lengthens them."""
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found)
