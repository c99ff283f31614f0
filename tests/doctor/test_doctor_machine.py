"""The doctor's checks of the machine, against limits set here."""

import os
import resource
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from widemix import cgroups
from widemix.doctor import CHECKS, Finding, machine, run_check


def look(what: str) -> Finding:
    return run_check(CHECKS[what])


def test_a_disk_that_is_too_small_and_one_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as large:
        large.setattr(shutil, "disk_usage", lambda _: namedtuple("usage", "free")(7 << 30))
        assert look("disk").state == "ok"
        assert "7 GiB free" in look("disk").text
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
    assert finding.text == f"1 of {every} allowed"
    assert finding.state == ("note" if every and every > 1 else "ok")


def test_a_cpu_quota_under_the_allowed_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (machine, cgroups):
        monkeypatch.setattr(module, "cpu_quota", lambda: 0.5)
    finding = look("CPUs")
    assert (finding.state, finding.fix) == ("note", "--data.workers 1")


def test_a_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_limit", lambda: 3 << 30)
    finding = look("memory")
    assert finding.state == "note"
    assert finding.text.startswith("3 GiB by cgroup limit, of ")


def test_a_low_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        assert look("open files") == Finding("at most 512, which is low", "note", "ulimit -n 4096")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def usage(free: int):
    return lambda _: namedtuple("usage", "free")(free)


def test_disk_and_shared_memory_are_too_small_below_a_gibibyte(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", usage(1 << 30))
    assert look("disk") == Finding(f"1 GiB free in {tmp_path}")
    assert machine.check_shared_memory(str(tmp_path)) == Finding(f"1 GiB free in {tmp_path}")
    monkeypatch.setattr(shutil, "disk_usage", usage((1 << 30) - (1 << 24)))
    disk = Finding(f"0.98 GiB free in {tmp_path}", "missing", "cd to a folder with 1 GiB free")
    assert look("disk") == disk
    memory = machine.check_shared_memory(str(tmp_path))
    text = f"0.98 GiB free in {tmp_path}: too little for several GPUs"
    assert (memory.text, memory.state) == (text, "note")


@pytest.mark.parametrize(
    ("allowed", "quota", "finding"),
    [
        (8, None, Finding("8 of 8 allowed")),
        (8, 8.0, Finding("8 of 8 allowed, 8 by cgroup quota")),
        (8, 3.5, Finding("8 of 8 allowed, 3.5 by cgroup quota: more threads than the quota would wait", "note",
                         "--data.workers 3")),
        (4, None, Finding("4 of 8 allowed", "note", "to allow more: srun --cpus-per-task=N, or docker run --cpus=N")),
        (4, 2.0, Finding("4 of 8 allowed, 2 by cgroup quota: more threads than the quota would wait", "note",
                         "--data.workers 3")),
    ],
)  # fmt: skip
def test_cpus_are_counted_with_their_quota(monkeypatch: pytest.MonkeyPatch, allowed, quota, finding) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for name, value in {"allowed_cpus": allowed, "cpu_quota": quota, "usable_cpus": 3}.items():
        monkeypatch.setattr(machine, name, lambda value=value: value)
    assert look("CPUs") == finding


@pytest.mark.parametrize(
    ("total", "limit", "finding"),
    [
        (8, None, Finding("8 GiB")),
        (8, 16, Finding("8 GiB")),
        (8, 5, Finding("5 GiB by cgroup limit, of 8")),
        (4, None, Finding("4 GiB")),
        (8, 3, Finding("3 GiB by cgroup limit, of 8: too little for two ranks", "note", "train with one rank")),
    ],
)
def test_memory_is_that_of_the_machine_or_its_limit(monkeypatch: pytest.MonkeyPatch, total, limit, finding) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": total << 18}.__getitem__)
    monkeypatch.setattr(machine, "memory_limit", lambda: limit and limit << 30)
    assert look("memory") == finding


@pytest.mark.parametrize(
    ("limit", "finding"),
    [
        (-1, Finding("unlimited")),
        (1024, Finding("at most 1024")),
        (1023, Finding("at most 1023, which is low", "note", "ulimit -n 4096")),
    ],
)
def test_open_files_are_few_below_1024(monkeypatch: pytest.MonkeyPatch, limit, finding) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, 1 << 20))
    assert look("open files") == finding
