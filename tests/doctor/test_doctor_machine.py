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
