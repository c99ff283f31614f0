"""What the kernel leaves this process of the machine's CPUs and memory: affinity, and the limits of cgroups.

Containers and batch systems cut a machine by either; `os.cpu_count` knows of neither.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cpus() -> int:
    """How many threads or processes can be busy at once: the allowed CPUs, fewer where a cgroup's quota is lower."""
    quota = cpu_quota()
    return allowed_cpus() if quota is None else max(1, min(allowed_cpus(), int(quota)))


def allowed_cpus() -> int:
    """The CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def cpu_quota(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> float | None:
    """CPUs' worth of time that the cgroups of this process leave it, versions 1 and 2; None without a limit."""
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


def cpu_share(seconds: float = 0.5) -> float:
    """The share of a CPU that a busy thread gets: less than 1 where others use the node, or a limit holds it back."""
    began, used = time.perf_counter(), time.thread_time()
    while time.perf_counter() - began < seconds:
        pass
    return (time.thread_time() - used) / (time.perf_counter() - began)


def memory_limit(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int | None:
    """Bytes that the cgroups of this process leave it, versions 1 and 2; None without a limit."""
    names = ("memory.max", "memory.limit_in_bytes")
    words = [word for folder in _cgroups("memory", root, own) for name in names for word in _words(folder / name)]
    return min((int(word) for word in words if word != "max"), default=None)


def _cgroups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """The folders that limit this process: its own cgroup and all above it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            base = root / controller if controllers else root  # version 1 has a tree for each controller
            inside = base / path.lstrip("/")
            yield from (folder for folder in (inside, *inside.parents) if folder.is_relative_to(base))


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
