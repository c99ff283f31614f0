"""A run has one holder: leases are taken by one process, expire, and are taken over by one process."""

import errno
import json
import os
import platform
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from widemix.lease import EXPIRY_S, RENEWAL_S, Holder, Leases


def holder(folder, **changes):
    """Make a lease of the run `c` look like that of another machine, not renewed for 100 s."""
    path = max(folder.glob("leases/c.*"))
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    os.utime(path, (time.time() - 100,) * 2)


def slow_to_take(folder, readable=True):
    """A process that has seen an expired lease of `c`, with a record or none, which has been released since."""
    first, slow = (Leases(folder, expiry_s=60) for _ in range(2))
    assert first.take("c")
    holder(folder, machine="another")
    if not readable:
        (path,) = folder.glob("leases/c.*")
        path.write_text("")
        os.utime(path, (time.time() - 100,) * 2)
    seen = slow.holder("c")
    first.release("c")
    slow.holder = lambda _: seen
    return slow


def test_one_of_many_takes_a_cell(tmp_path):
    everyone = [Leases(tmp_path) for _ in range(16)]
    with ThreadPoolExecutor(16) as pool:
        taken = list(pool.map(lambda leases: leases.take("c"), everyone))
    assert sum(taken) == 1
    one = everyone[taken.index(True)]
    assert one.renew("c")
    one.release("c")
    assert one.holder("c") is None
    assert everyone[0].take("c")
    assert len(list(tmp_path.glob("leases/*"))) == 1  # the lease


def test_an_expired_lease_is_taken_over_once_and_its_holder_notices(tmp_path):
    first = Leases(tmp_path, expiry_s=60)
    assert first.take("c")
    holder(tmp_path, machine="another", host="n7")
    everyone = [Leases(tmp_path, expiry_s=60) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda leases: leases.take("c"), everyone))
    assert sum(taken) == 1
    assert not first.renew("c")
    first.release("c")  # which leaves the other's alone
    assert everyone[taken.index(True)].renew("c")
    assert not first.take("c")
    everyone[taken.index(True)].release("c")
    assert list(tmp_path.glob("leases/*")) == []


def test_a_lease_that_is_renewed_does_not_expire(tmp_path):
    first, second = Leases(tmp_path, expiry_s=60), Leases(tmp_path, expiry_s=60)
    assert first.take("c")
    holder(tmp_path, machine="another")
    assert first.renew("c")
    assert not second.take("c")


def test_the_lease_of_a_process_that_was_killed_is_free_at_once_but_not_while_its_cell_still_ends(tmp_path):
    code = f"from widemix.lease import Leases; l = Leases(__import__('pathlib').Path({str(tmp_path)!r})); "
    child = subprocess.Popen(["sleep", "60"])
    subprocess.run([sys.executable, "-c", code + f"assert l.take('c'); l.add_process('c', {child.pid})"], check=True)
    leases = Leases(tmp_path)
    assert not leases.take("c")
    child.kill()
    child.wait()
    assert leases.take("c")


@pytest.mark.parametrize("moment", ["Leases._record", "os.fsync"])
def test_a_process_that_is_killed_while_it_takes_a_cell_holds_nothing(tmp_path, moment):
    code = f"""
import os, pathlib, signal, sys
from widemix.lease import Leases
Leases.holder = lambda *_: None  # which writes a file too
{moment} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Leases(pathlib.Path(sys.argv[1])).take("c")
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], check=False)
    assert done.returncode == -signal.SIGKILL
    assert Leases(tmp_path).take("c")


def test_without_hard_links_one_of_many_takes_a_cell(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    test_one_of_many_takes_a_cell(tmp_path)
    leases, before = Leases(tmp_path), len(os.listdir("/proc/self/fd"))
    assert all(leases.take(run) for run in ("d", "e"))
    assert len(os.listdir("/proc/self/fd")) == before
    assert leases.holder("e").pid == os.getpid()


def test_a_cell_that_is_released_and_taken_anew_is_not_taken_over(tmp_path):
    slow, quick = slow_to_take(tmp_path), Leases(tmp_path, expiry_s=60)
    assert quick.take("c")
    assert not slow.take("c")
    assert quick.renew("c")


def test_a_file_system_that_does_not_answer_for_a_while_costs_nothing_and_for_long_the_run(tmp_path, monkeypatch):
    """One ESTALE must not end the renewal; after the lease has expired another may have the run."""
    leases = Leases(tmp_path, expiry_s=60)
    assert leases.take("c")
    now, listdir = time.monotonic(), os.listdir

    def refused(path):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refused)
        for later, held in ((10, True), (59, True), (61, False)):
            patch.setattr(time, "monotonic", lambda later=later: now + later)
            assert leases.renew("c") == held
        patch.setattr(os, "listdir", listdir)
        assert leases.renew("c")
        patch.setattr(os, "listdir", refused)
        for later, held in ((120, True), (122, False)):  # 59 and 61 seconds after the renewal
            patch.setattr(time, "monotonic", lambda later=later: now + later)
            assert leases.renew("c") == held
    assert leases.renew("c")


def test_a_process_that_has_ended_holds_nothing_though_its_number_is_still_known(tmp_path):
    """As that of a process whose starter has not asked for its exit code, or that a later one has been given."""
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    path = tmp_path / "leases/c.1"
    for process in ([ended.pid, psutil.Process(ended.pid).create_time()], [os.getpid(), 1.0]):
        first, other = Leases(tmp_path), Leases(tmp_path)
        assert first.take("c")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"processes": [process]}))
        assert not other.holder("c").alive
        assert other.take("c")
        other.release("c")
        assert list(tmp_path.glob("leases/*")) == []  # nor is the other's left
    ended.wait()


def test_a_lease_that_is_gone_is_noticed_and_one_that_is_held_names_its_holder(tmp_path):
    first, other = Leases(tmp_path), Leases(tmp_path)
    assert first.take("c")
    found = other.holder("c")
    assert (found.generation, found.host, found.pid, found.alive) == (1, platform.node(), os.getpid(), True)
    assert first.renew("c")
    (tmp_path / "leases/c.1").unlink()
    assert not first.renew("c")


def test_runs_whose_names_begin_alike_or_have_signs_of_patterns_are_apart(tmp_path):
    names = ["a", "a.1", "a+", "aa", "(b"]
    leases = Leases(tmp_path)
    assert all(leases.take(name) for name in names)
    assert [leases.holder(name).generation for name in names] == [1] * 5
    for number, name in enumerate(names, start=1):
        leases.release(name)
        assert [leases.holder(other) is None for other in names] == [other in names[:number] for other in names]


def test_a_lease_outlives_some_renewals_that_came_to_nothing_and_expires_after_two_minutes(tmp_path):
    assert Leases(tmp_path).take("c")
    assert 3 * RENEWAL_S < EXPIRY_S == 120
    holder(tmp_path, machine="another")  # 100 s ago
    assert Leases(tmp_path).holder("c").alive
    os.utime(tmp_path / "leases/c.1", (time.time() - 130,) * 2)
    assert not Leases(tmp_path).holder("c").alive


def test_who_has_a_run_does_not_get_it_twice(tmp_path):
    leases = Leases(tmp_path)
    assert leases.take("c")
    assert not leases.take("c")
    leases.release("c")
    assert leases.take("c")


@pytest.mark.parametrize("readable", [True, False])
def test_a_lease_that_is_released_while_another_takes_it_over_is_left_to_the_next(tmp_path, readable):
    slow, next_one = slow_to_take(tmp_path, readable), Leases(tmp_path, expiry_s=60)
    assert not slow.take("c")
    assert next_one.holder("c") is None
    assert next_one.take("c")


def test_a_lease_whose_time_cannot_be_set_is_not_renewed(tmp_path, monkeypatch):
    leases, now = Leases(tmp_path, expiry_s=60), time.monotonic()
    assert leases.take("c")

    def refused(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "utime", refused)
    for later, held in ((59, True), (62, False)):
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        assert leases.renew("c") == held


def test_a_lease_that_was_taken_over_is_released_last_and_what_others_have_removed_is_no_error(tmp_path, monkeypatch):
    first, second = Leases(tmp_path, expiry_s=60), Leases(tmp_path, expiry_s=60)
    assert first.take("c")
    holder(tmp_path, machine="another")
    assert second.take("c")
    removed, unlink = [], Path.unlink

    def noted(path, **options):
        removed.append(path.name)
        unlink(path)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", noted)
    second.release("c")
    assert removed == ["c.1", "c.2"]


def test_a_lease_that_is_released_while_it_is_looked_at_is_nobodys(tmp_path, monkeypatch):
    first, other = Leases(tmp_path), Leases(tmp_path)
    assert first.take("c")
    monkeypatch.setattr(other, "_now", lambda: first.release("c") or time.time())
    assert other.holder("c") is None


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff", b"3"])
def test_a_lease_whose_record_is_damaged_counts_until_it_expires(tmp_path, content):
    (tmp_path / "leases").mkdir()
    path = tmp_path / "leases/c.12"
    path.write_bytes(content)
    leases = Leases(tmp_path)
    assert leases.holder("c") == Holder(12, "", "unknown", 0, alive=True)
    assert not leases.take("c")
    os.utime(path, (time.time() - 130,) * 2)
    assert leases.take("c")
    assert leases.holder("c").generation == 13


def test_each_process_of_a_lease_is_noted_with_its_own_start(tmp_path):
    leases = Leases(tmp_path)
    assert leases.take("c")
    leases.add_process("c", os.getppid())
    known = json.loads((tmp_path / "leases/c.1").read_text())
    assert known["processes"] == [[pid, psutil.Process(pid).create_time()] for pid in (os.getpid(), os.getppid())]
    assert known["pid"] == os.getpid()
