"""What cgroups leave a process, read from folders laid out as the kernel's."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.clone import CLONE
from widemix.cgroups import allowed_cpus, cpu_quota, memory_limit, usable_cpus

HELD_BACK = """
import os, signal, time, types
from widemix import cgroups
calls = 0
def perf_counter():
    global calls
    calls += 1
    if calls == 100:
        os.kill(os.getpid(), signal.SIGSTOP)
    return time.perf_counter()
cgroups.time = types.SimpleNamespace(perf_counter=perf_counter, thread_time=time.thread_time)
print(cgroups.cpu_fraction(0.5))
"""


def cgroups(root: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    (root / "own").write_text(f"{own}\n")
    return root, root / "own"


def test_limits_of_cgroups_2_hold_from_any_level(tmp_path: Path) -> None:
    files = {
        "job/cpu.max": "150000 100000",
        "job/step/cpu.max": "max 100000",
        "cpu.max": "400000 100000",
        "memory.max": "8192",
        "job/memory.max": "max",
        "job/step/memory.max": "4096",
        "other/memory.max": "1",
    }
    given = cgroups(tmp_path, "0::/job/step", files)
    assert (cpu_quota(*given), memory_limit(*given)) == (1.5, 4096)
    given = cgroups(tmp_path, "0::/job/a:b", {"job/a:b/memory.max": "2048"})  # as names of containers may be
    assert (cpu_quota(*given), memory_limit(*given)) == (1.5, 2048)


def test_limits_of_cgroups_1(tmp_path: Path) -> None:
    files = {
        "cpu/job/cpu.cfs_quota_us": "50000",
        "cpu/job/cpu.cfs_period_us": "100000",
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/job/memory.limit_in_bytes": "8192",
    }
    files["cpu/other/cpu.cfs_quota_us"], files["cpu/other/cpu.cfs_period_us"] = "1000", "100000"
    given = cgroups(tmp_path, "5:cpuset:/other\n4:memory:/job\n2:cpu,cpuacct:/job\n0::/", files)
    assert (cpu_quota(*given), memory_limit(*given)) == (0.5, 8192)


def test_no_cgroups_no_limits(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path, tmp_path / "none") is None
    assert memory_limit(tmp_path, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("allowed", "quota", "usable"),
    [(8, "max", 8), (8, "50000", 1), (8, "290000", 2), (8, "6400000", 8), (1, "6400000", 1)],
)
def test_cpus_are_those_allowed_or_fewer_by_a_quota(system, allowed: int, quota: str, usable: int) -> None:
    files = {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": f"{quota} 100000\n"}

    def read(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    system({"os.sched_getaffinity": lambda _: set(range(allowed)), "pathlib.Path.read_text": read})
    assert (allowed_cpus(), usable_cpus()) == (allowed, usable)


def test_a_thread_that_is_held_back_says_so() -> None:
    """Stopped for most of the time, as a limit of cgroups does: it stops itself, so that it is within that time."""
    command = [sys.executable, "-c", HELD_BACK]
    with subprocess.Popen(command, cwd=CLONE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        time.sleep(1.0)
        process.send_signal(signal.SIGCONT)
        assert float(process.stdout.read()) < 0.5
