"""A run folder has one writer, by a lock or a lease."""

import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT
from tests.shims import preload
from widemix import lock
from widemix.errors import InputError
from widemix.lease import Leases, machine_name
from widemix.lock import hold, hold_lease


class Clock:
    """Of those who wait for a folder: it stands still but for their sleep, before which `then` is called."""

    def __init__(self, monkeypatch, then=lambda: None):
        self.now, self._then = 0.0, then
        parts = {"monotonic": lambda: self.now, "sleep": self._sleep, "strftime": time.strftime}
        monkeypatch.setattr(lock, "time", SimpleNamespace(**parts))

    def _sleep(self, seconds):
        self._then()
        self.now += seconds


@pytest.mark.parametrize(("holding", "left"), [(hold, [".lock"]), (hold_lease, [])])
def test_a_run_folder_has_one_writer(holding, left, tmp_path, monkeypatch, capsys):
    """The other is on this machine, and lives: it is waited for a moment, with locks and without."""
    clock = Clock(monkeypatch)
    with (
        holding(tmp_path),
        pytest.raises(InputError, match=rf"process {os.getpid()} on .* is writing there; name another folder"),
        holding(tmp_path),
    ):
        pass
    assert lock.KILLED_S < clock.now < 10
    assert [path.name for path in tmp_path.iterdir()] == left
    assert capsys.readouterr().err == ""


def test_a_run_whose_machine_died_is_waited_for_and_taken_over(tmp_path, capsys, monkeypatch):
    clock = Clock(monkeypatch)
    assert Leases(tmp_path).take("run")
    path = tmp_path / "leases/run.1"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "another", "host": "n7"}))
    written = path.stat().st_mtime
    monkeypatch.setattr(Leases, "_now", lambda _: written + clock.now)
    with hold_lease(tmp_path, expiry_s=60):
        assert 60 <= clock.now < 70
    assert "on n7; waiting until it is free" in capsys.readouterr().err


def test_a_run_that_was_suspended_ends_when_another_has_its_folder(tmp_path, monkeypatch, capsys):
    ended = threading.Event()
    monkeypatch.setattr(lock.os, "_exit", lambda code: ended.set())
    with hold_lease(tmp_path, expiry_s=0.4):
        (tmp_path / "leases/run.2").write_text("{}")
        assert ended.wait(300)
    assert "another run has taken it" in capsys.readouterr().err


def test_who_does_not_wait_is_refused_at_once(tmp_path, monkeypatch):
    waits, seconds = [], itertools.count()
    parts = {"monotonic": lambda: next(seconds), "sleep": waits.append, "strftime": time.strftime}
    with hold(tmp_path):
        monkeypatch.setattr(lock, "time", SimpleNamespace(**parts))
        with pytest.raises(InputError, match="is writing there"), hold(tmp_path, wait_s=0):
            pass
    assert waits == []


def test_one_that_was_killed_on_this_machine_may_take_a_moment_to_end(tmp_path, monkeypatch):
    with ExitStack() as killed:
        killed.enter_context(hold(tmp_path))
        clock = Clock(monkeypatch, then=killed.close)
        with hold(tmp_path):
            assert 0 < clock.now < 1


@pytest.mark.parametrize("freed", [True, False])
def test_the_lock_of_another_machine_is_waited_for(tmp_path, capsys, monkeypatch, freed):
    """A server frees the locks of a machine that died a minute or two later: a job requeued before must not end."""
    with ExitStack() as elsewhere:
        elsewhere.enter_context(hold(tmp_path))
        path = tmp_path / ".lock"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "another", "host": "n7"}))
        if freed:
            Clock(monkeypatch, then=elsewhere.close)
            with hold(tmp_path, wait_s=60):
                assert json.loads(path.read_text())["host"] == platform.node()
        else:
            clock = Clock(monkeypatch)
            with pytest.raises(InputError, match=r"process \d+ on n7 is writing there"), hold(tmp_path, wait_s=60):
                pass
            assert 60 < clock.now < 62
    assert capsys.readouterr().err.count("on n7; waiting until it is free") == 1


def test_a_folder_that_its_holder_has_removed_is_made_again_and_held(tmp_path, monkeypatch):
    """As one does that could not start: who waited for it holds the folder that is there, as a third one sees."""
    folder = tmp_path / "run"
    folder.mkdir()
    with ExitStack() as first:
        first.enter_context(hold(folder))

        def leave():
            if list(folder.iterdir()) and clock.now == 0:
                shutil.rmtree(folder)
                first.close()

        clock = Clock(monkeypatch, then=leave)
        before = len(os.listdir("/proc/self/fd"))
        with hold(folder):
            assert len(os.listdir("/proc/self/fd")) == before  # one more, and that of the first is closed
            assert json.loads((folder / ".lock").read_text())["pid"] == os.getpid()
            with pytest.raises(InputError, match="is writing there"), hold(folder):
                pass


@pytest.mark.parametrize("machine", ["another", machine_name(), f"{machine_name()} another-name"])
def test_what_has_this_machines_name_or_its_boot_alone_may_still_end(tmp_path, monkeypatch, machine):
    """As another start of the machine, or a container of it, whose network may be cut."""
    with hold(tmp_path):
        path = tmp_path / ".lock"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": machine}))
        clock = Clock(monkeypatch)
        with pytest.raises(InputError, match="is writing there"), hold(tmp_path, wait_s=60):
            pass
    assert clock.now > 60


def test_a_folder_on_a_file_system_without_locks_is_made_and_held_by_a_lease(tmp_path, monkeypatch):
    clock, folder = Clock(monkeypatch), tmp_path / "a/new/run"
    monkeypatch.setattr(lock, "try_lock", lambda descriptor: None)
    with hold(folder):
        assert sorted(path.name for path in folder.rglob("*")) == [".lock", "leases", "run.1"]
        assert clock.now == 0
        with pytest.raises(InputError, match=rf"process {os.getpid()} on .* is writing there"), hold(folder):
            pass
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_lease_is_given_back_and_renewed_no_more_after_an_error(tmp_path):
    def fail():
        with hold_lease(tmp_path):
            assert "lease" in [thread.name for thread in threading.enumerate()]
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert "lease" not in [thread.name for thread in threading.enumerate()]
    assert list(tmp_path.iterdir()) == []


# Holds a folder of runs or of prep, says so, and waits for its end.
HOLDER = """
import sys
from pathlib import Path
from widemix import lock
from widemix.data_prep.prep_dir import lock_folder
lock.KILLED_S = 0.2
with {"run": lock.hold, "prep": lock_folder}[sys.argv[1]](Path(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("kind", "busy"),
    [
        ("run", r"process \d+ on .* is writing there; name another"),
        ("prep", "another process is writing to it; wait"),
    ],
)
def test_where_locks_hold_on_no_other_machine_the_lease_decides(tmp_path, kind, busy):
    folder = tmp_path / "out"

    def start():
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        words, environ = [sys.executable, "-c", HOLDER, kind, folder], os.environ | preload("no_locks")
        return stack.enter_context(subprocess.Popen(words, env=environ, cwd=ROOT, text=True, **pipes))

    with ExitStack() as stack:
        first = start()
        assert first.stdout.readline() == "held\n"
        assert re.search(rf"InputError: {folder}: {busy}", start().communicate()[1])
        first.kill()  # whose lease does not count then
        again = start()
        assert again.stdout.readline() == "held\n"
        assert again.communicate() == ("", "")
    assert [path.name for path in folder.iterdir()] == ([".lock"] if kind == "run" else [])
