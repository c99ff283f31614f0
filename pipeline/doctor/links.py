"""How fast ranks talk: an all-reduce of all together, and nodes two by two, to find the slow one."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipeline.distributed.topology import Topology

LARGE = 16 << 20  # bytes; four times as many on GPUs
ROUNDS = 3


def measure_links(topology: Topology) -> dict[str, Any]:
    """The clock at one moment, seconds of a tiny all-reduce, bytes/s of a large one and with some other nodes."""
    dist.all_reduce(torch.zeros(1))  # by gloo, which all ranks leave at the same moment
    clock = time.time()
    device = topology.device
    tiny, large = torch.zeros(1, device=device), torch.zeros(_size(device) // 4, device=device)
    dist.all_reduce(large)  # connects, which is not counted
    latency = _shortest(lambda: dist.all_reduce(tiny), device, 10)
    seconds = _shortest(lambda: dist.all_reduce(large), device, 3)
    bus = 2 * (topology.world - 1) / topology.world * large.nbytes / seconds
    return {"clock": clock, "latency": latency, "bus": bus, "pairs": _pairs(topology, large)}


def pairings(count: int) -> list[list[int]]:
    """The partner of each of `count` nodes in some rounds (the node itself: it rests), all pairs of a round apart.

    By the circle method: the last one stays, the others turn, so that each has another partner in every round.
    """
    places = count + count % 2
    rounds = []
    for turn in range(min(ROUNDS, places - 1)):
        circle = [places - 1, *((turn + i) % (places - 1) for i in range(places - 1))]
        partner = list(range(places))
        for one, other in zip(circle[: places // 2], reversed(circle[places // 2 :]), strict=True):
            partner[one], partner[other] = other, one
        rounds.append([p if p < count else i for i, p in enumerate(partner[:count])])
    return rounds


def _pairs(topology: Topology, payload: torch.Tensor) -> list[float]:
    """Bytes/s, there and back, with each partner; of the first ranks of nodes, while the others wait."""
    found = []
    nodes = topology.world // topology.local_world
    node = topology.rank // topology.local_world
    for partners in pairings(nodes) if nodes > 1 else []:
        dist.barrier()
        other = partners[node]
        if topology.local_rank == 0 and other != node:
            turns = partial(_exchange, payload, other * topology.local_world, node < other)
            found.append(2 * payload.nbytes / _shortest(turns, payload.device, 3))
    dist.barrier()
    return found


def _exchange(payload: torch.Tensor, other: int, first: bool) -> None:
    for turn in (first, not first):
        if turn:
            dist.send(payload, other)
        else:
            dist.recv(payload, other)


def _shortest(action: Callable[[], object], device: torch.device, times: int) -> float:
    shortest = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        shortest = min(shortest, time.perf_counter() - began)
    return shortest


def _size(device: torch.device) -> int:
    return 4 * LARGE if device.type == "cuda" else LARGE
