"""A run has one holder: leases are taken by one process, expire, and are taken over by one process."""

import errno
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp

import psutil
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from widemix.lease import EXPIRY_S, RENEWAL_S, Holder, Leases, machine_name

RUNS = st.sampled_from(["c", "c.1", "c+", "cc", "(c"])  # names that begin alike, or have signs of patterns
PROCESSES = st.integers(0, 2)


def change(folder: Path, run: str = "c", age_s: float = 0.0, **changes: object) -> None:
    """Let the lease of a run be so old, with another record."""
    own = (path for path in folder.glob("leases/*") if path.stem == run)
    path = max(own, key=lambda path: int(path.suffix[1:]))
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    os.utime(path, (time.time() - age_s,) * 2)


class Runs(RuleBasedStateMachine):
    """Processes take, renew and release runs; leases expire, and their processes die."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(mkdtemp())
        self.processes = [Leases(self.folder, expiry_s=60) for _ in range(3)]
        self.holders: dict[str, int] = {}  # who has the last lease of each run
        self.counting: set[str] = set()  # the runs whose lease counts
        self.believed: set[tuple[int, str]] = set()  # who would renew or release which run

    @rule(process=PROCESSES, run=RUNS)
    def take(self, process: int, run: str) -> None:
        is_free = run not in self.counting
        assert self.processes[process].take(run) == is_free
        if is_free:
            self.holders[run] = process
            self.counting.add(run)
            self.believed.add((process, run))

    @precondition(lambda self: self.believed)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        process, run = data.draw(st.sampled_from(sorted(self.believed)))
        is_own = self.holders.get(run) == process
        assert self.processes[process].renew(run) == is_own
        self.counting |= {run} if is_own else set()

    @precondition(lambda self: self.believed)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        process, run = data.draw(st.sampled_from(sorted(self.believed)))
        self._release(process, run)

    def _release(self, process: int, run: str) -> None:
        self.processes[process].release(run)
        self.believed.discard((process, run))
        if self.holders.get(run) == process:
            del self.holders[run]
            self.counting.discard(run)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), dies=st.booleans())
    def lose(self, data: st.DataObject, dies: bool) -> None:
        """Its machine is cut off, or its process ends without a word."""
        run = data.draw(st.sampled_from(sorted(self.holders)))
        if dies:
            ended = [os.getpid(), 1.0]  # a number that another process has by now
            change(self.folder, run, machine=machine_name(), processes=[ended])
            self.believed.discard((self.holders[run], run))
        else:
            change(self.folder, run, age_s=100, machine="another")
        self.counting.discard(run)

    @invariant()
    def each_lease_counts_or_not(self) -> None:
        for run in ("c", "c.1", "c+", "cc", "(c"):
            found = self.processes[0].holder(run)
            assert (found is not None and found.alive) == (run in self.counting)
            assert (found is not None) == (run in self.holders)

    def teardown(self) -> None:
        try:
            for process, run in sorted(self.believed):
                self._release(process, run)
            for run in sorted(self.holders):  # of those that have died
                assert self.processes[0].take(run)
                self.processes[0].release(run)
            assert list(self.folder.glob("leases/*")) == []
        finally:
            shutil.rmtree(self.folder)


TestRuns = Runs.TestCase
TestRuns.settings = settings(max_examples=10, stateful_step_count=20)


@pytest.fixture
def held(tmp_path):
    """The lease of `c`, which expires after a minute."""
    leases = Leases(tmp_path, expiry_s=60)
    assert leases.take("c")
    return leases


def refused(number: int):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("expired", [False, True])
def test_one_of_many_takes_a_run(held, links, expired, tmp_path, system):
    if expired:
        change(tmp_path, age_s=100, machine="another")
    else:
        held.release("c")
    if not links:  # as file systems without hard links
        system({"os.link": refused(errno.EPERM)})
    everyone, before = [Leases(tmp_path, expiry_s=60) for _ in range(16)], len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(16) as pool:
        taken = list(pool.map(lambda leases: leases.take("c"), everyone))
    assert sum(taken) == 1
    one = everyone[taken.index(True)]
    assert one.renew("c")
    assert one.holder("c").pid == os.getpid()
    assert len(os.listdir("/proc/self/fd")) == before
    one.release("c")
    assert list(tmp_path.glob("leases/*")) == []


def test_a_lease_of_the_same_number_may_be_anothers(held, tmp_path):
    """Of who has taken it since all were released: one that was suspended renewed and removed the other's."""
    second, third = Leases(tmp_path, expiry_s=60), Leases(tmp_path, expiry_s=60)
    change(tmp_path, age_s=100, machine="another")
    assert second.take("c")
    second.release("c")
    assert third.take("c")
    assert not held.renew("c")
    held.release("c")
    assert third.renew("c")


def test_a_killed_process_holds_nothing_unless_its_child_lives(tmp_path):
    code = f"from widemix.lease import Leases; l = Leases(__import__('pathlib').Path({str(tmp_path)!r})); "
    child = subprocess.Popen(["sleep", "60"])
    subprocess.run([sys.executable, "-c", code + f"assert l.take('c'); l.add_process('c', {child.pid})"], check=True)
    assert not Leases(tmp_path).take("c")
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its number is still known
    assert Leases(tmp_path).take("c")
    child.wait()


@pytest.mark.parametrize("moment", ["os.link", "os.fsync"])
def test_a_process_killed_while_it_takes_holds_nothing(tmp_path, moment):
    code = f"""
import os, pathlib, signal, sys
from widemix.lease import Leases
{moment} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Leases(pathlib.Path(sys.argv[1])).take("c")
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], check=False)
    assert done.returncode == -signal.SIGKILL
    assert Leases(tmp_path).take("c")


@pytest.mark.parametrize("retaken", [True, False])
@pytest.mark.parametrize("record", [{"machine": "another"}, None])
def test_a_lease_released_while_another_takes_it_over(held, record, retaken, tmp_path, system):
    """It is left to the next, who may have taken it already. Its record may be damaged."""
    change(tmp_path, age_s=100, machine="another")
    if record is None:
        (tmp_path / "leases/c.1").write_text("")
        os.utime(tmp_path / "leases/c.1", (time.time() - 100,) * 2)
    link, slow, quick = os.link, Leases(tmp_path, expiry_s=60), Leases(tmp_path, expiry_s=60)

    def wait_and_link(*paths):
        system({"os.link": link})
        (tmp_path / "leases/c.1").unlink()  # as `release` does
        if retaken:
            assert quick.take("c")
        return link(*paths)

    system({"os.link": wait_and_link})
    assert not slow.take("c")
    assert quick.renew("c") if retaken else quick.take("c")


@pytest.mark.parametrize("call", ["os.listdir", "os.utime"])
def test_a_file_system_may_not_answer_for_a_while(held, call, system):
    """One ESTALE must not end the renewal; after the lease has expired another may have the run."""
    now, works = time.monotonic(), {"os.listdir": os.listdir, "os.utime": os.utime}[call]
    for later, answers, is_held in (
        *((10, False, True), (59, False, True), (61, False, False), (61, True, True)),
        *((120, False, True), (122, False, False)),  # 59 and 61 seconds after the renewal
    ):
        system({"time.monotonic": lambda later=later: now + later, call: works if answers else refused(errno.ESTALE)})
        assert held.renew("c") == is_held


def test_a_lease_names_its_holder_and_its_processes(held, tmp_path):
    found = Leases(tmp_path).holder("c")
    assert (found.generation, found.host, found.pid, found.alive) == (1, platform.node(), os.getpid(), True)
    held.add_process("c", os.getppid())
    known = json.loads((tmp_path / "leases/c.1").read_text())
    assert known["processes"] == [[pid, psutil.Process(pid).create_time()] for pid in (os.getpid(), os.getppid())]
    assert known["pid"] == os.getpid()
    (tmp_path / "leases/c.1").unlink()
    assert not held.renew("c")


def test_a_lease_outlives_renewals_that_failed_for_two_minutes(held, tmp_path):
    assert 3 * RENEWAL_S < EXPIRY_S == 120
    for age_s, counts in ((100, True), (130, False)):
        change(tmp_path, age_s=age_s, machine="another")
        assert Leases(tmp_path).holder("c").alive == counts


def test_a_lease_is_released_last_whatever_others_have_removed(held, tmp_path, system):
    """Of those that it was taken over from."""
    change(tmp_path, age_s=100, machine="another")
    second, removed, unlink = Leases(tmp_path, expiry_s=60), [], Path.unlink
    assert second.take("c")

    def noted(path, **options):
        removed.append(path.name)
        unlink(path)
        unlink(path, **options)

    system({"pathlib.Path.unlink": noted})
    second.release("c")
    assert removed == ["c.1", "c.2"]


def test_a_lease_released_while_it_is_looked_at_is_nobodys(held, tmp_path, system):
    replace = Path.replace

    def release_and_replace(path, target):  # of the file whose time is that of the file system
        system({"pathlib.Path.replace": replace})
        held.release("c")
        return replace(path, target)

    other = Leases(tmp_path)
    system({"pathlib.Path.replace": release_and_replace})
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
