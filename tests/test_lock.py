"""A run folder has one writer, by a lock or a lease."""

import errno
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

import pytest

from tests.clone import ROOT
from tests.shims import preload
from widemix.errors import InputError
from widemix.lease import Leases, machine_name
from widemix.lock import KILLED_S, hold, hold_lease

BUSY = rf"process {os.getpid()} on .* is writing there; name another folder"


class Clock:
    """Of those who wait for a folder: it stands still but for their sleep, before which `then` is called."""

    def __init__(self, system, then=lambda: None):
        self.now, self.then = 0.0, then
        system({"time.monotonic": lambda: self.now, "time.sleep": self._sleep})

    def _sleep(self, seconds):
        self.then()
        self.now += seconds


@pytest.fixture
def clock(system):
    return Clock(system)


def change(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(("holding", "left"), [(hold, [".lock"]), (hold_lease, [])])
def test_a_run_folder_has_one_writer(holding, left, clock, tmp_path, capsys):
    """The other is on this machine, and lives: it is waited for a moment, with locks and without."""
    with holding(tmp_path), pytest.raises(InputError, match=BUSY), holding(tmp_path):
        pass
    assert KILLED_S < clock.now < 10
    assert [path.name for path in tmp_path.iterdir()] == left
    assert capsys.readouterr().err == ""


def test_a_run_whose_machine_died_is_taken_over(tmp_path, capsys, clock):
    assert Leases(tmp_path).take("run")
    path, written = tmp_path / "leases/run.1", time.time()
    change(path, machine="another", host="n7")
    clock.then = lambda: os.utime(path, (written - clock.now,) * 2)
    with hold_lease(tmp_path, expiry_s=60):
        assert 58 <= clock.now < 70
    assert "on n7; waiting until it is free" in capsys.readouterr().err


def test_a_suspended_run_ends_when_another_has_its_folder(tmp_path, system, capsys):
    ended = threading.Event()
    system({"os._exit": lambda code: ended.set()})
    with hold_lease(tmp_path, expiry_s=0.4):
        (tmp_path / "leases/run.2").write_text("{}")
        assert ended.wait(300)
    assert "another run has taken it" in capsys.readouterr().err


def test_who_does_not_wait_is_refused_at_once(tmp_path, system):
    waits, seconds = [], itertools.count()
    with hold(tmp_path):
        system({"time.monotonic": lambda: next(seconds), "time.sleep": waits.append})
        with pytest.raises(InputError, match="is writing there"), hold(tmp_path, wait_s=0):
            pass
    assert waits == []


def test_one_killed_on_this_machine_may_take_a_moment(tmp_path, clock):
    with ExitStack() as killed:
        killed.enter_context(hold(tmp_path))
        clock.then = killed.close
        with hold(tmp_path):
            assert 0 < clock.now < 1


@pytest.mark.parametrize("machine", ["another", machine_name(), f"{machine_name()} another-name"])
@pytest.mark.parametrize("freed", [True, False])
def test_the_lock_of_another_machine_is_waited_for(tmp_path, capsys, clock, freed, machine):
    """A server frees the locks of a machine that died a minute or two later: a job requeued before must not end.

    Another machine is also another start of this one, or a container of it, whose network may be cut.
    """
    path = tmp_path / ".lock"
    with ExitStack() as elsewhere:
        elsewhere.enter_context(hold(tmp_path))
        change(path, machine=machine, host="n7")
        if freed:
            clock.then = elsewhere.close
            with hold(tmp_path, wait_s=60):
                assert json.loads(path.read_text())["host"] == platform.node()
        else:
            with pytest.raises(InputError, match=r"process \d+ on n7 is writing there"), hold(tmp_path, wait_s=60):
                pass
            assert 60 < clock.now < 62
    assert capsys.readouterr().err.count("on n7; waiting until it is free") == 1


def test_a_folder_that_its_holder_has_removed_is_made_again(tmp_path, clock):
    """As one does that could not start: who waited for it holds the folder that is there, as a third one sees."""
    folder = tmp_path / "run"
    folder.mkdir()
    with ExitStack() as first:
        first.enter_context(hold(folder))

        def leave():
            if list(folder.iterdir()) and clock.now == 0:
                shutil.rmtree(folder)
                first.close()

        clock.then = leave
        before = len(os.listdir("/proc/self/fd"))
        with hold(folder):
            assert len(os.listdir("/proc/self/fd")) == before  # one more, and that of the first is closed
            assert json.loads((folder / ".lock").read_text())["pid"] == os.getpid()
            with pytest.raises(InputError, match="is writing there"), hold(folder):
                pass


def test_a_file_system_without_locks_has_leases(tmp_path, clock, system):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    folder = tmp_path / "a/new/run"
    system({"fcntl.flock": no_locks})
    with hold(folder):
        assert sorted(path.name for path in folder.rglob("*")) == [".lock", "leases", "run.1"]
        assert clock.now == 0
        with pytest.raises(InputError, match=BUSY), hold(folder):
            pass
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_lease_is_given_back_after_an_error(tmp_path):
    def renewing():
        return "lease" in [thread.name for thread in threading.enumerate()]

    with pytest.raises(ValueError, match="True"), hold_lease(tmp_path):
        raise ValueError(renewing())
    assert not renewing()
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
