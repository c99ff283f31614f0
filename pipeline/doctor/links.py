"""The speed of the network: an all-reduce over all ranks, and transfers between pairs of nodes to find slow ones."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from widemix.distributed.topology import Topology

LARGE = 16 << 20  # bytes; four times as many on GPUs
ROUNDS = 3


def measure_links(topology: Topology) -> dict[str, Any]:
    """Measure the network on this rank; all ranks must call it.

    Returns "clock", the time of all ranks at one moment (s since 1970); "latency", of an all-reduce of one number
    (s); "bus", the bus bandwidth of a large one (bytes/s, as NCCL defines it); "pairs", bytes/s with other nodes.
    """
    clocks = []
    for _ in range(5):  # of which a busy machine may miss one or two
        dist.all_reduce(torch.zeros(1))  # by gloo: all ranks leave it at nearly the same moment
        clocks.append(time.time())
    clock = statistics.median(clocks)
    device = topology.device
    tiny, large = torch.zeros(1, device=device), torch.zeros(_size(device) // 4, device=device)
    _all_reduce(large)  # not timed: it connects
    latency = _shortest(lambda: _all_reduce(tiny), device, 10)
    seconds = _shortest(lambda: _all_reduce(large), device, 3)
    bus = 2 * (topology.world - 1) / topology.world * large.nbytes / seconds
    return {"clock": clock, "latency": latency, "bus": bus, "pairs": _pairs(topology, large)}


def pairings(count: int) -> list[list[int]]:
    """Return the partner of each of `count` nodes for some rounds; a node that is its own partner pauses.

    By the circle method for round-robin tournaments: a node has another partner in every round.
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


def _all_reduce(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor, async_op=True).wait()  # only so NCCL notices here that it fails, or its timeout


def _pairs(topology: Topology, payload: torch.Tensor) -> list[float]:
    """Bytes/s, there and back, with each partner. The first rank of each node measures, the others wait."""
    rates = []
    nodes = topology.world // topology.local_world
    node = topology.rank // topology.local_world
    for partners in pairings(nodes) if nodes > 1 else []:
        dist.barrier()
        other = partners[node]
        if topology.local_rank == 0 and other != node:
            exchange = partial(_exchange, payload, other * topology.local_world, node < other)
            rates.append(2 * payload.nbytes / _shortest(exchange, payload.device, 3))
    dist.barrier()
    return rates


def _exchange(payload: torch.Tensor, other: int, sends_first: bool) -> None:
    for sends in (sends_first, not sends_first):
        if sends:
            dist.send(payload, other)
        else:
            dist.recv(payload, other)


def _shortest(action: Callable[[], object], device: torch.device, times: int) -> float:
    """The shortest time of some repetitions, s."""
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
