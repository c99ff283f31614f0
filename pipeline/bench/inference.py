"""Latency and throughput of a trained network by batch size: `widemix bench inference`.

One forward pass at a time on a batch in memory, without data, in evaluation mode. The batch sizes take turns, so that
a busy machine slows all of them alike.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from widemix.bench.timing import wall_clock
from widemix.errors import InputError
from widemix.evaluation.networks import Network
from widemix.recipe.data import DataSection

VERSIONS = ("torch", "timm")
BATCHES = (1, 8, 64, 256)
_WARM_UP = 2  # rounds that compile and allocate, and are not counted


@torch.inference_mode()
def measure_inference(
    network: Network, batches: Sequence[int], rounds: int, precision: str, device: torch.device
) -> list[dict[str, Any]]:
    """Return a row for each batch size: `latency_ms` of a forward pass, its 90th percentile, and images a second.

    precision: fp32, bf16 or fp16, of autocast. On a CPU also `images_per_cpu_s`, by the CPU time of all threads,
    which other processes disturb least. Raises `InputError` for a network of text.
    """
    if not isinstance(network.data, DataSection):
        raise InputError(f"bench inference: {network.name} reads {network.data.kind}, not images")
    side, module = network.data.image_size, network.module.to(device)
    inputs = torch.randn(max(batches), 3, side, side).contiguous(memory_format=torch.channels_last).to(device)
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    passes: dict[int, list[tuple[float, float]]] = {batch: [] for batch in batches}  # wall clock and CPU time, s
    for _ in range(rounds + _WARM_UP):
        for batch, own in passes.items():
            given = inputs[:batch]
            began, cpu = wall_clock(device), time.process_time()
            with torch.autocast(device.type, dtype, enabled=precision != "fp32"):
                module(given)
            own.append((wall_clock(device) - began, time.process_time() - cpu))
    return [_row(batch, own[_WARM_UP:], device) for batch, own in passes.items()]


def _row(batch: int, passes: Sequence[tuple[float, float]], device: torch.device) -> dict[str, Any]:
    """Medians over the rounds."""
    wall, cpu = (sorted(own) for own in zip(*passes, strict=True))
    row = {
        "name": f"batch {batch}",
        "batch": batch,
        "latency_ms": round(1e3 * statistics.median(wall), 3),
        "latency_p90_ms": round(1e3 * wall[min(len(wall) - 1, int(0.9 * len(wall)))], 3),
        "images_per_s": round(batch / statistics.median(wall), 2),
    }
    if device.type == "cpu":
        row["images_per_cpu_s"] = round(batch / statistics.median(cpu), 2)
    return row
