"""The doctor's checks of the machine, against limits set here."""

import os
import resource
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from pipeline.doctor import CHECKS, Finding, examine, machine
from pipeline.doctor.machine import cpu_quota, memory_limit


def look(what: str) -> Finding:
    return examine(CHECKS[what])


def test_a_disk_that_is_too_small_and_one_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look("disk").state == "ok"
    assert f"{shutil.disk_usage('.').free / 2**30:.0f} GiB free" in look("disk").found
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: namedtuple("usage", "free")(100 << 20))
        assert (look("disk").state, look("shared memory").state) == ("missing", "note")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert look("disk").state == "missing"


def test_no_shared_memory(tmp_path: Path) -> None:
    assert machine.check_shared_memory(str(tmp_path / "none")).state == "note"


def test_cpus_that_this_process_may_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, every = os.sched_getaffinity(0), os.cpu_count()
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        finding = look("CPUs")
    finally:
        os.sched_setaffinity(0, allowed)
    assert finding.found == f"1 of {every} allowed"
    assert finding.state == ("note" if every and every > 1 else "ok")


def test_a_cpu_quota_under_the_allowed_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_quota", lambda: 0.5)
    finding = look("CPUs")
    assert (finding.state, finding.cure) == ("note", "--data.workers 1")


def test_a_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_limit", lambda: 3 << 30)
    finding = look("memory")
    assert finding.state == "note"
    assert finding.found.startswith("3 GiB by cgroup limit, of ")


def test_a_low_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        assert look("open files") == Finding("512 at a time: little", "note", "ulimit -n 4096")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
        "job/memory.max": "max",
        "job/step/memory.max": "4096",
        "other/memory.max": "1",
    }
    given = cgroups(tmp_path, "0::/job/step", files)
    assert (cpu_quota(*given), memory_limit(*given)) == (1.5, 4096)


def test_limits_of_cgroups_1(tmp_path: Path) -> None:
    files = {
        "cpu/job/cpu.cfs_quota_us": "50000",
        "cpu/job/cpu.cfs_period_us": "100000",
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/job/memory.limit_in_bytes": "8192",
    }
    given = cgroups(tmp_path, "4:memory:/job\n2:cpu,cpuacct:/job\n0::/", files)
    assert (cpu_quota(*given), memory_limit(*given)) == (0.5, 8192)


def test_no_cgroups_no_limits(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path, tmp_path / "none") is None
    assert memory_limit(tmp_path, tmp_path / "none") is None
