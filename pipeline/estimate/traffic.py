"""The collectives of a step by engine, and how long they take.

Bytes are of the whole tensor that is summed, gathered or scattered. On a ring of W ranks every rank sends 2 (W-1)/W
of them in an all-reduce and (W-1)/W in the others (Patarasuk & Yuan 2009; NCCL's "bus bandwidth").
"""

import math
from typing import NamedTuple

from widemix.estimate.hardware import LATENCY
from widemix.estimate.network import Pass
from widemix.recipe.engine import EngineSection
from widemix.recipe.train import TrainSection


class Traffic(NamedTuple):
    """All collectives of one kind in a step of a rank."""

    kind: str  # all-reduce, all-gather, reduce-scatter
    bytes: float
    calls: int
    hidden: bool  # overlaps with the backward pass

    def seconds(self, world: int, bandwidth: float) -> float:
        """Return the seconds on a ring of `world` ranks whose slowest link has `bandwidth` bytes/s."""
        if world == 1:
            return 0.0
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * (world - 1) / world * self.bytes / bandwidth + self.calls * LATENCY


def step_traffic(engine: EngineSection, train: TrainSection, network: Pass) -> list[Traffic]:
    """Return the collectives of a step, as `rehearse` counts them; `network` is the recipe's."""
    weights, blocks, in_blocks = network.weights, network.blocks, network.in_blocks
    size = 4 if train.precision == "fp32" else 2
    reduced = 2 if engine.reduce_dtype == "bf16" else 4
    bucket = engine.bucket_cap_mb * 2**20
    if engine.kind == "ddp":
        gradients = reduced * weights
        return [Traffic("all-reduce", gradients, math.ceil(4 * weights / bucket), hidden=True)]
    if engine.kind == "fsdp":
        gathered = size * (weights + in_blocks)  # blocks are gathered again for the backward pass
        return [
            Traffic(
                "all-gather",
                train.grad_accum_steps * gathered,
                train.grad_accum_steps * (2 * blocks + 1),
                hidden=True,
            ),
            Traffic("reduce-scatter", reduced * weights, blocks + 1, hidden=True),
        ]
    if engine.zero_stage == 0:
        return [Traffic("all-reduce", reduced * weights, math.ceil(4 * weights / bucket), hidden=True)]
    calls = math.ceil(weights / (bucket // 4))  # DeepSpeed counts elements of a bucket
    if engine.zero_stage == 3:
        times = train.grad_accum_steps
        return [
            Traffic("all-gather", size * weights, calls, hidden=engine.overlap_comm),
            Traffic("reduce-scatter", times * reduced * weights, times * calls, hidden=engine.overlap_comm),
        ]
    times = train.grad_accum_steps if engine.zero_stage == 2 else 1
    return [
        Traffic("all-reduce", times * reduced * weights, times * calls, hidden=engine.overlap_comm),
        Traffic("all-gather", size * weights, calls, hidden=False),  # of the updated weights
    ]


def exposed(traffic: list[Traffic], world: int, bandwidth: float, backward: float) -> float:
    """Return the seconds of a step that communication adds to computing.

    backward: seconds of the backward pass, which hidden traffic overlaps with, except its last call: when that starts
    nothing is left to compute.
    """
    exposed_s, overlapped, last = 0.0, 0.0, 0.0
    for part in traffic:
        seconds = part.seconds(world, bandwidth)
        if part.hidden:
            overlapped += seconds
            last += seconds / part.calls
        else:
            exposed_s += seconds
    return exposed_s + max(last, overlapped - backward)
