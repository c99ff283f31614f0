"""Memory of weights and their state on each rank; the collectives of a step by engine, and how long they take.

Bytes are of the whole tensor that is summed, gathered or scattered. On a ring of W ranks every rank sends 2 (W-1)/W
of them in an all-reduce and (W-1)/W in the others (Patarasuk & Yuan 2009; NCCL's "bus bandwidth").
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from widemix.estimate.hardware import LATENCY, Cluster
from widemix.estimate.network import Pass
from widemix.optim.section import OPTIMIZERS
from widemix.recipe.sections import EngineSection, TrainSection


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank, in the steady state of training."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.optimizer


def state_bytes(
    parameters: int,
    *,
    trained: int | None = None,
    optimizer: str = "adamw",
    engine: Literal["ddp", "fsdp", "deepspeed"] = "ddp",
    zero_stage: int = 0,
    world: int = 1,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    reduce_dtype: Literal["fp32", "bf16"] = "fp32",
    ema: bool = False,
    offload: bool = False,
) -> StateBytes:
    """Memory of `parameters` weights under `optim.name: OPTIMIZER` (Rajbhandari et al. 2020, section 3 and figure 1).

    trained: how many of them are not frozen; by default all. world: ranks that share the shards. ema: with an average
    (DeepSpeed's is of the trained weights alone), sharded as the optimizer's states are. offload: these and the
    optimizer's states, of FSDP everything, are in host memory.

    DDP keeps weights and gradients in fp32 in any precision, and so does FSDP, sharded. DeepSpeed keeps them in half
    precision in bf16 and fp16, with an fp32 copy of the weights next to the optimizer's states, and adds gradients up
    in `reduce_dtype`; ZeRO 1 shards the optimizer, 2 the gradients too, 3 the weights too. Not counted: communication
    buckets, activations, fragmentation.
    """
    half = engine == "deepspeed" and precision != "fp32"
    stage = {"ddp": 0, "fsdp": 3, "deepspeed": zero_stage}[engine]
    trained = parameters if trained is None else trained
    averaged = trained if engine == "deepspeed" else parameters
    states = OPTIMIZERS[optimizer].states + half
    offload &= stage > 0
    if offload and engine == "fsdp":
        return StateBytes(0, 0, 0)

    def shards(from_stage: int) -> int:
        return world if stage >= from_stage else 1

    number = 2 if half else 4
    wide = half and reduce_dtype == "fp32"  # below stage 2 these sums are next to the gradients in half precision
    return StateBytes(
        weights=number * parameters / shards(3),
        gradients=(4 * wide + number * (not wide or stage < 2)) * trained / shards(2),
        optimizer=0 if offload else 4 * (states * trained + ema * averaged) / shards(1),
    )


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
    if engine.kind == "ddp" or (engine.kind == "deepspeed" and engine.zero_stage == 0):
        return [Traffic("all-reduce", reduced * trained, math.ceil(4 * trained / bucket), ring, hidden=True)]
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
