"""What an engine's ranks send each other in a step, and how long that takes.

Bytes are of the whole tensor that is summed, gathered or scattered. On a ring of W ranks an all-reduce moves
2 (W-1)/W of them past every rank, the others (W-1)/W (Patarasuk & Yuan 2009; NCCL's "bus bandwidth").
"""

import math
from typing import NamedTuple

from pipeline.estimate.hardware import LATENCY
from pipeline.recipe import Recipe


class Traffic(NamedTuple):
    """One kind of collective in a step of a rank."""

    kind: str  # all-reduce, all-gather, reduce-scatter
    bytes: float
    calls: int
    hidden: bool  # goes on while the backward pass computes

    def seconds(self, world: int, bandwidth: float) -> float:
        """On a ring whose slowest link moves `bandwidth` bytes/s."""
        if world == 1:
            return 0.0
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * (world - 1) / world * self.bytes / bandwidth + self.calls * LATENCY


def step_traffic(recipe: Recipe, weights: int, blocks: int, in_blocks: int) -> list[Traffic]:
    """Of so many weights, of which `in_blocks` lie in blocks that FSDP gathers one by one. `rehearse` counts it."""
    engine, train = recipe.engine, recipe.train
    size = 4 if train.precision == "fp32" else 2
    bucket = engine.bucket_cap_mb * 2**20
    if engine.kind == "ddp":
        gradients = (2 if engine.bf16_compress else 4) * weights
        return [Traffic("all-reduce", gradients, math.ceil(4 * weights / bucket), hidden=True)]
    if engine.kind == "fsdp":
        gathered = size * (weights + in_blocks)  # for the backward pass again, but not what lies outside of blocks
        return [
            Traffic(
                "all-gather",
                train.grad_accum_steps * gathered,
                train.grad_accum_steps * (2 * blocks + 1),
                hidden=True,
            ),
            Traffic("reduce-scatter", 4 * weights, blocks + 1, hidden=True),
        ]
    if engine.zero_stage == 0:
        return [Traffic("all-reduce", 4 * weights, math.ceil(4 * weights / bucket), hidden=True)]
    calls = math.ceil(weights / (bucket // 4))  # DeepSpeed's buckets count elements
    if engine.zero_stage == 3:
        times = train.grad_accum_steps
        return [
            Traffic("all-gather", size * weights, calls, hidden=engine.overlap_comm),
            Traffic("reduce-scatter", times * size * weights, times * calls, hidden=engine.overlap_comm),
        ]
    times = train.grad_accum_steps if engine.zero_stage == 2 else 1
    return [
        Traffic("all-reduce", times * size * weights, times * calls, hidden=engine.overlap_comm),
        Traffic("all-gather", size * weights, calls, hidden=False),  # of what the optimiser has just written
    ]


def exposed(traffic: list[Traffic], world: int, bandwidth: float, backward: float) -> float:
    """Seconds of a step that wait for the network: all that is not hidden behind `backward` seconds of computing.

    The last call's share can't hide, since nothing is left to compute when it starts.
    """
    open_, covered, last = 0.0, 0.0, 0.0
    for part in traffic:
        seconds = part.seconds(world, bandwidth)
        if part.hidden:
            covered += seconds
            last += seconds / part.calls
        else:
            open_ += seconds
    return open_ + max(last, covered - backward)
