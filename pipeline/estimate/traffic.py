"""The collectives of a step by engine, and how long they take.

Bytes are of the whole tensor that is summed, gathered or scattered. On a ring of W ranks every rank sends 2 (W-1)/W
of them in an all-reduce and (W-1)/W in the others (Patarasuk & Yuan 2009; NCCL's "bus bandwidth").
"""

import math
from typing import NamedTuple

from widemix.estimate.hardware import LATENCY, Cluster
from widemix.estimate.network import Pass
from widemix.recipe.engine import EngineSection
from widemix.recipe.train import TrainSection


class Ring(NamedTuple):
    """Some ranks, and the bytes/s of the slowest link between them."""

    ranks: int
    bandwidth: float


class Traffic(NamedTuple):
    """All collectives of one kind in a step of a rank."""

    kind: str  # all-reduce, all-gather, reduce-scatter
    bytes: float
    calls: int
    ring: Ring
    hidden: bool  # overlaps with the backward pass
    times: int = 1  # micro-batches of the step that have them: all, or the last

    @property
    def seconds(self) -> float:
        """The seconds that they take, one after the other."""
        if self.ring.ranks == 1:
            return 0.0
        passes = (2 if self.kind == "all-reduce" else 1) * (self.ring.ranks - 1) / self.ring.ranks
        return passes * self.bytes / self.ring.bandwidth + self.calls * LATENCY


def step_traffic(engine: EngineSection, train: TrainSection, network: Pass, cluster: Cluster) -> list[Traffic]:
    """Return the collectives of a step, as `rehearse` counts them; `network` is the recipe's."""
    weights, trained, blocks, in_blocks = network.weights, network.trained, network.blocks, network.in_blocks
    ring = Ring(cluster.gpus, cluster.bandwidth)
    size = 4 if train.precision == "fp32" else 2
    reduced = 2 if engine.reduce_dtype == "bf16" else 4
    bucket = engine.bucket_cap_mb * 2**20
    if engine.kind == "ddp":
        calls = math.ceil(4 * trained / bucket)
        return [Traffic("all-reduce", reduced * trained, calls, ring, hidden=True)]
    if engine.kind == "fsdp":
        times = train.grad_accum_steps
        gathered = size * (weights + in_blocks)  # blocks are gathered again for the backward pass
        summed = [Traffic("reduce-scatter", reduced * trained, blocks + 1, ring, hidden=True)]
        if engine.sharding == "hybrid" and cluster.hosts > 1:
            ring = Ring(cluster.local, cluster.kind.link)
            # Every GPU of a node sums its shard with the other nodes, by a share of the node's network.
            between = Ring(cluster.hosts, cluster.bandwidth / cluster.local)
            shards = Traffic("all-reduce", reduced * trained / cluster.local, blocks + 1, between, hidden=True)
            summed = [summed[0]._replace(ring=ring), shards]
        return [Traffic("all-gather", times * gathered, times * (2 * blocks + 1), ring, True, times), *summed]
    if engine.zero_stage == 0:
        return [Traffic("all-reduce", reduced * trained, math.ceil(4 * trained / bucket), ring, hidden=True)]
    calls = math.ceil(trained / (bucket // 4))  # DeepSpeed counts elements of a bucket
    overlaps = engine.overlap_comm
    if engine.zero_stage == 3:
        times = train.grad_accum_steps
        return [
            Traffic("all-gather", size * weights, math.ceil(weights / (bucket // 4)), ring, overlaps),
            Traffic("reduce-scatter", times * reduced * trained, times * calls, ring, overlaps, times),
        ]
    times = train.grad_accum_steps if engine.zero_stage == 2 else 1
    return [
        Traffic("all-reduce", times * reduced * trained, times * calls, ring, overlaps, times),
        Traffic("all-gather", size * trained, calls, ring, hidden=False),  # of the updated weights
    ]


def exposed(traffic: list[Traffic], backward: float) -> float:
    """Return the seconds of a step that communication adds to computing.

    backward: seconds of the backward pass of a micro-batch, which its hidden traffic overlaps with, except the last
    call: when that starts nothing is left to compute.
    """
    hidden = [part for part in traffic if part.hidden]
    others = max((part.times for part in hidden), default=1) - 1  # micro-batches before the last
    before = sum(part.seconds / part.times for part in hidden if part.times > 1)
    final = sum(part.seconds / part.times for part in hidden)
    last = sum(part.seconds / part.calls for part in hidden)
    exposed_s = sum(part.seconds for part in traffic if not part.hidden)
    return exposed_s + others * max(0.0, before - backward) + max(last, final - backward)
