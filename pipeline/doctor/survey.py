"""Measure on a rank: versions, limits, state and speed of its GPU, CPU and disk, and of the network.

The network by an all-reduce over all ranks, and by transfers between pairs of nodes, to find slow ones.
"""

import importlib.metadata
import io
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from widemix.cgroups import cpu_fraction
from widemix.distributed.rank_status import node_name
from widemix.distributed.topology import Topology
from widemix.files import advise

PACKAGES = ("torch", "torchvision", "timm", "deepspeed", "numba", "numpy", "pillow", "ffcv")
MAX_READ_S = 4.0  # a large file is read for so long
MIN_READ_S = 0.5  # and a small one repeatedly for so long
CHUNK = 4 << 20  # bytes
LARGE = 16 << 20  # bytes of the large all-reduce; four times as many on GPUs
ROUNDS = 3  # of transfers between pairs of nodes
# From nvidia-smi: uncorrected memory errors since the driver was loaded, hardware slowdown, temperature, memory use.
_QUERY = "ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.hw_slowdown,temperature.gpu,memory.used"


def survey(topology: Topology) -> dict[str, Any]:
    """Return what this rank measures, as JSON values; "disk" is added by the rank that reads it.

    "open_files" is a number, "locked_memory" and "shared_memory" are bytes, "cpu" the fraction of a CPU that a busy
    thread gets, "gpu" None on a CPU, "flops" FLOP/s.
    """
    import resource  # which only Unix has, and clusters

    return {
        "host": node_name(),
        "rank": topology.rank,
        "local_rank": topology.local_rank,
        "versions": _versions(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "shared_memory": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        "cpu": cpu_fraction(),
        "gpu": _gpu(topology.device),
        "flops": _flops(topology.device),
    }


def disk_name(folder: Path) -> str:
    """Return a name that is the same for all processes that read this disk on this machine, in containers too."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else node_name()
    return f"{machine}/{folder.stat().st_dev}"


def read_rate(folder: Path) -> float:
    """Return the bytes/s at which the largest .beton of a folder is read from disk; 0 if it has none.

    A small file is read repeatedly and the best reading counts, since the machine may be busy during one.
    """
    files = sorted(folder.glob("*.beton"), key=lambda path: path.stat().st_size)
    if not files:
        return 0.0
    best, deadline = 0.0, time.perf_counter() + MIN_READ_S
    with files[-1].open("rb", buffering=0) as file:
        while time.perf_counter() < deadline:
            best = max(best, _read(file))
    return best


def _read(file: io.FileIO) -> float:
    """Return the bytes/s of reading a file from its beginning, for at most `MAX_READ_S`."""
    advise(file.fileno(), 0, 0, "DONTNEED")  # read the disk, not the page cache
    file.seek(0)
    began, size = time.perf_counter(), 0
    while (chunk := file.read(CHUNK)) and time.perf_counter() - began < MAX_READ_S:
        size += len(chunk)
    return size / (time.perf_counter() - began)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    if torch.cuda.is_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def _gpu(device: torch.device) -> dict[str, Any] | None:
    """Return the name of the GPU, and its `health` if nvidia-smi is installed; None without a GPU."""
    if device.type != "cuda":
        return None
    gpu: dict[str, Any] = {"name": torch.cuda.get_device_name(device)}
    program = shutil.which("nvidia-smi")
    if program:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        command = [program, f"--id=GPU-{uuid}", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except subprocess.TimeoutExpired:
            return gpu | {"fault": "nvidia-smi does not answer"}
        if result.returncode:
            return gpu | {"fault": f"nvidia-smi: {(result.stdout or result.stderr).strip().splitlines()[0]}"}
        gpu |= health(result.stdout)
    return gpu


def health(line: str) -> dict[str, Any]:
    """Read a line of nvidia-smi: "fault" if the GPU has one, "celsius", and "used_mib" of its memory."""
    errors, slowdown, celsius, used = (word.strip() for word in line.split(","))
    values: dict[str, Any] = {}
    if errors.isdigit() and int(errors):
        values["fault"] = f"{errors} uncorrected memory errors"
    elif slowdown == "Active":
        values["fault"] = f"hardware slowdown of its clock at {celsius} C"
    if celsius.isdigit():
        values["celsius"] = int(celsius)
    if used.isdigit():
        values["used_mib"] = int(used)
    return values


def _flops(device: torch.device) -> float:
    """Return the FLOP/s of the fastest of some matrix products: a throttled node is slow, one busy moment is not."""
    side, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    a, b = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    times = 20 if device.type == "cuda" else 200  # on a CPU each is shorter than a time slice
    return 2 * side**3 / _shortest(lambda: a @ b, device, times)


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
    """Return the bytes/s, there and back, with each partner. Each node's first rank measures, the others wait."""
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
    """Return the shortest time of some repetitions, s."""
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
