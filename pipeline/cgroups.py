"""The CPUs and memory that this process may use: CPU affinity and cgroup limits.

Containers and batch systems set both; `os.cpu_count` ignores both.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cpus() -> int:
    """Return how many threads or processes can run at once: the allowed CPUs, or fewer by a cgroup's quota."""
    quota = cpu_quota()
    return allowed_cpus() if quota is None else max(1, min(allowed_cpus(), int(quota)))


def allowed_cpus() -> int:
    """Return the number of CPUs in this process's affinity mask; of the machine where processes have none."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> float | None:
    """Return the CPU quota of this process's cgroups (version 1 or 2), in CPUs; None without a limit."""
    quotas = []
    for folder in _cgroups("cpu", root, own):
        words = [
            *_words(folder / "cpu.max"),
            *_words(folder / "cpu.cfs_quota_us"),
            *_words(folder / "cpu.cfs_period_us"),
        ]
        if len(words) == 2 and words[0] not in ("max", "-1"):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def cpu_fraction(seconds: float = 0.5) -> float:
    """Return the fraction of a CPU that a busy thread gets in `seconds`: below 1 if the node is shared or limited."""
    began, used = time.perf_counter(), time.thread_time()
    while time.perf_counter() - began < seconds:
        pass
    return (time.thread_time() - used) / (time.perf_counter() - began)


def memory_limit(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int | None:
    """Return the memory limit of this process's cgroups (version 1 or 2), in bytes; None without a limit."""
    names = ("memory.max", "memory.limit_in_bytes")
    words = [word for folder in _cgroups("memory", root, own) for name in names for word in _words(folder / name)]
    return min((int(word) for word in words if word != "max"), default=None)


def _cgroups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Return the folders of this process's cgroup and of all its parents."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            base = root / controller if controllers else root  # version 1 has one tree per controller
            inside = base / path.lstrip("/")
            yield from (folder for folder in (inside, *inside.parents) if folder.is_relative_to(base))


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
