"""What a rank can say of itself without the network: versions, clock, GPU, disk, limits, how fast it computes."""

import importlib.metadata
import io
import os
import platform
import resource
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from pipeline.cgroups import cpu_share
from pipeline.distributed.rank_status import node_name
from pipeline.distributed.topology import Topology

PACKAGES = ("torch", "torchvision", "timm", "deepspeed", "numba", "numpy", "pillow", "ffcv")
LONG, SHORT = 4.0, 0.5  # seconds that a large file is read for, and that a small one is read again for
PIECE = 4 << 20
# Of nvidia-smi: uncorrected memory errors since the driver was loaded, a clock held down by the hardware, heat, use.
_ASKED = "ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.hw_slowdown,temperature.gpu,memory.used"


def survey(topology: Topology) -> dict[str, Any]:
    """The facts of this rank, ready for JSON, but for how fast its disk is."""
    return {
        "host": node_name(),
        "rank": topology.rank,
        "local_rank": topology.local_rank,
        "versions": _versions(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "shared_memory": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        "cpu": cpu_share(),
        "gpu": _gpu(topology.device),
        "flops": _flops(topology.device),
    }


def disk_name(folder: Path) -> str:
    """The same for all who read from one disk on one machine: ranks, and nodes that are containers of one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else node_name()
    return f"{machine}/{folder.stat().st_dev}"


def read_rate(folder: Path) -> float:
    """Bytes/s that the largest .beton of a folder is read at from its disk; 0 where there is none.

    Of a file that is read in no time the best of some readings: one may fall on a busy moment.
    """
    files = sorted(folder.glob("*.beton"), key=lambda path: path.stat().st_size)
    if not files:
        return 0.0
    best, until = 0.0, time.perf_counter() + SHORT
    with files[-1].open("rb", buffering=0) as file:
        while time.perf_counter() < until:
            best = max(best, _read(file))
    return best


def _read(file: io.FileIO) -> float:
    """Bytes/s of reading a file from its beginning, as far as one comes."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what memory holds says nothing of the disk
    file.seek(0)
    began, got = time.perf_counter(), 0
    while (piece := file.read(PIECE)) and time.perf_counter() - began < LONG:
        got += len(piece)
    return got / (time.perf_counter() - began)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    if torch.cuda.is_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _gpu(device: torch.device) -> dict[str, Any] | None:
    """Name, and what nvidia-smi says of its health where that is there; None without a GPU."""
    if device.type != "cuda":
        return None
    found: dict[str, Any] = {"name": torch.cuda.get_device_name(device)}
    program = shutil.which("nvidia-smi")
    if program:
        which = str(torch.cuda.get_device_properties(device).uuid)
        command = [program, f"--id=GPU-{which}", f"--query-gpu={_ASKED}", "--format=csv,noheader,nounits"]
        try:
            asked = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except subprocess.TimeoutExpired:
            return found | {"ill": "nvidia-smi does not answer"}
        if asked.returncode:
            return found | {"ill": f"nvidia-smi: {(asked.stdout or asked.stderr).strip().splitlines()[0]}"}
        found |= health(asked.stdout)
    return found


def health(line: str) -> dict[str, Any]:
    """What a line of nvidia-smi says: `ill` where the GPU is, its temperature in C and used memory in MiB."""
    errors, slowed, heat, used = (word.strip() for word in line.split(","))
    found: dict[str, Any] = {}
    if errors.isdigit() and int(errors):
        found["ill"] = f"{errors} uncorrected memory errors"
    elif slowed == "Active":
        found["ill"] = f"its clock is held down by the hardware at {heat} C"
    if heat.isdigit():
        found["celsius"] = int(heat)
    if used.isdigit():
        found["used_mib"] = int(used)
    return found


def _flops(device: torch.device) -> float:
    """FLOP/s of a matrix product, the best of some: a busy moment does not make a node slow, a throttled GPU does."""
    side, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    a, b = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    shortest = float("inf")
    for _ in range(20 if device.type == "cuda" else 200):  # on a CPU each fits into a slice of the scheduler's
        began = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        shortest = min(shortest, time.perf_counter() - began)
    return 2 * side**3 / shortest
