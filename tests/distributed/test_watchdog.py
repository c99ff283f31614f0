"""What a rank that fails raises and leaves behind, where several share a run folder and a store."""

import ctypes
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from tests.forks import Forks
from widemix.distributed import watchdog
from widemix.distributed.rank_status import read_rank_statuses
from widemix.distributed.topology import Topology
from widemix.distributed.watchdog import Watchdog
from widemix.errors import InputError

WORLD = 2


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch):
    monkeypatch.setattr(watchdog, "HEARTBEAT_INTERVAL", 0.01)
    monkeypatch.setattr(watchdog, "GRACE_PERIOD", 600.0)  # after which it ends pytest


def ranks_that_fail(run_dir: Path, store: HashStore, *errors: BaseException | None) -> list[BaseException | None]:
    """What leaves each rank's watchdog when these are raised in turn, with all ranks within theirs."""
    topologies = [Topology(rank, WORLD, rank, WORLD, torch.device("cpu")) for rank in range(WORLD)]
    guards = [Watchdog(run_dir, topology, store, 600) for topology in topologies]
    raised: list[BaseException | None] = []
    for guard in guards:
        guard.__enter__()
    for guard, error in zip(guards, errors, strict=True):
        try:
            guard.__exit__(type(error) if error else None, error, None)
            raised.append(error)
        except RuntimeError as other:
            raised.append(other)
    assert not (run_dir / "stacks").exists()
    return raised


def test_an_input_error_on_all_ranks_stays_one(tmp_path):
    first, second = ranks_that_fail(tmp_path, HashStore(), InputError("no such key"), InputError("no such key"))
    assert isinstance(first, InputError)
    assert isinstance(second, InputError)


def test_a_broken_collective_names_who_failed_first(tmp_path):
    _, second = ranks_that_fail(tmp_path, HashStore(), InputError("no data here"), OSError("connection closed"))
    assert str(second).startswith("rank 0 on ")
    assert "no data here; so this rank ends (connection closed)" in str(second)


def test_a_second_ctrl_c_is_the_others_reason(tmp_path):
    interrupt = KeyboardInterrupt()
    first, other = ranks_that_fail(tmp_path, HashStore(), interrupt, RuntimeError("Connection closed by peer"))
    assert first is interrupt
    assert "rank 0 on " in str(other)
    assert ": interrupted; so this rank ends (Connection closed by peer)" in str(other)
    both = [KeyboardInterrupt(), KeyboardInterrupt()]
    assert ranks_that_fail(tmp_path, HashStore(), *both) == both


def test_an_error_named_in_passing_is_not_the_same(tmp_path):
    errors = [OSError("the disk is full, says the kernel"), OSError("the disk is full")]
    _, second = ranks_that_fail(tmp_path, HashStore(), *errors)
    assert str(second).endswith("the disk is full, says the kernel; so this rank ends (the disk is full)")
    interrupt = KeyboardInterrupt()
    assert ranks_that_fail(tmp_path, HashStore(), OSError("no"), interrupt)[1] is interrupt


def test_nothing_of_a_watchdog_outlives_its_block(tmp_path):
    store = HashStore()
    with Watchdog(tmp_path, Topology(1, 2, 1, 2, torch.device("cpu")), store, 600) as guard:
        assert [thread.is_alive() for thread in guard._threads] == [True, True]
    assert [thread.is_alive() for thread in guard._threads] == [False, False]
    assert store.get("alive 1") == b"done"
    with pytest.raises(FileNotFoundError):
        Watchdog(tmp_path / "moved", Topology(0, 1, 0, 1, torch.device("cpu")), store, 600).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_all_ranks_is_not_repeated(tmp_path):
    """As when the loss diverges."""
    _, second = ranks_that_fail(
        tmp_path, HashStore(), RuntimeError("the loss is nan"), RuntimeError("the loss is nan")
    )
    assert str(second) == "the loss is nan"


def test_a_rank_removes_no_folder_that_another_uses(tmp_path, monkeypatch):
    """Each removes the folder of stacks if it is empty, also just after another has made it."""
    made, mkdir = [], Path.mkdir

    def and_removed_by_another(path, *arguments, **options):
        mkdir(path, *arguments, **options)
        if path == tmp_path / "stacks":
            made.append(path)
            if len(made) == 1:
                path.rmdir()

    monkeypatch.setattr(Path, "mkdir", and_removed_by_another)
    with Watchdog(tmp_path, Topology(0, 1, 0, 1, torch.device("cpu")), HashStore(), 600):
        assert (tmp_path / "stacks/rank-0.txt").exists()
    assert len(made) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_rank_is_silent_once_its_heartbeat_stopped():
    """Not one that sends heartbeats, nor one that has ended; one that has never sent any, as well."""
    now = 1000.0
    store, heartbeats = HashStore(), watchdog._Heartbeats(4, now)
    for second in range(0, 100, 10):
        now = 1000.0 + second
        store.set("alive 1", f"{now}")
        store.set("alive 2", "done" if second >= 20 else f"{now}")
        if second <= 30:
            store.set("alive 3", f"{now}")
        assert heartbeats.find_silent(store, now) == (3 if second > 30 + watchdog.HEARTBEAT_TIMEOUT else None)
    never = watchdog._Heartbeats(2, now)
    now += watchdog.HEARTBEAT_TIMEOUT
    assert never.find_silent(HashStore(), now) is None
    now += 1
    assert never.find_silent(HashStore(), now) == 1


def test_rank_0_reports_a_silent_rank_to_others(tmp_path, monkeypatch):
    """Of three ranks the last never sends a heartbeat. The clock goes on once both others have sent one."""
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now, strftime=time.strftime, sleep=time.sleep)
    monkeypatch.setattr(watchdog, "time", clock)
    store = HashStore()
    topologies = [Topology(rank, 3, rank, 3, torch.device("cpu")) for rank in range(2)]
    with (
        Watchdog(tmp_path, topologies[0], store, 600) as main,
        Watchdog(tmp_path, topologies[1], store, 600) as other,
    ):
        deadline = time.monotonic() + 300
        while not (main._failure and other._failure):
            assert time.monotonic() < deadline
            if main._last_contact == other._last_contact == now - 1000:
                now += watchdog.LONGEST_GAP
            time.sleep(0.01)
    assert main._failure == other._failure == "rank 2 has sent no heartbeat for 40 s"
    assert 1000 + watchdog.HEARTBEAT_TIMEOUT < now <= 1000 + 2 * watchdog.HEARTBEAT_TIMEOUT


def test_a_hung_main_thread_ends_with_its_stacks(tmp_path, monkeypatch):
    """But not while its beats come in time."""
    now, ended = 1000.0, []
    clock = SimpleNamespace(monotonic=lambda: now, strftime=time.strftime, sleep=time.sleep)
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(watchdog, "GRACE_PERIOD", 0.1)
    monkeypatch.setattr("os._exit", lambda code: (ended.append(code), guarded._stopped.set()))
    monkeypatch.setenv("WIDEMIX_RANK_STATUS_DIR", str(tmp_path / "status"))
    monkeypatch.setenv("RANK", "0")
    with Watchdog(tmp_path, Topology(0, 1, 0, 1, torch.device("cpu")), HashStore(), 1.0) as guarded:
        for _ in range(4):
            for _ in range(2):
                now += 0.45
                time.sleep(0.2)  # it looks ten times a second
            guarded.beat()
        assert not ended
        now += 0.45
        time.sleep(0.2)
        assert not ended
        while not guarded._stopped.wait(0.2):
            assert now < 1010
            now += 0.45
        assert now > 1004.6
    assert ended == [1]
    (status,) = read_rank_statuses(tmp_path / "status")
    assert status.code == 1
    assert "no step or batch was finished in 1 s" in status.message
    stacks = (tmp_path / "stacks/rank-0.txt").read_text()
    reason, _, frames = stacks.partition("no step or batch was finished in 1 s")
    assert "test_a_hung_main_thread" in frames
    assert "Thread 0x" not in reason


def guarded(run_dir: Path, holds_gil: bool) -> None:
    """For four seconds beats come in time; or none does, and no other thread of Python runs."""
    watchdog.GRACE_PERIOD = 0.5
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with Watchdog(run_dir, Topology(0, 1, 0, 1, torch.device("cpu")), HashStore(), 1.0) as guard:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == blocked  # Ctrl-C and Slurm's signals arrive
        if holds_gil:
            ctypes.PyDLL(None).sleep(600)
        for beat in range(40):
            time.sleep(0.1)
            guard.beat()
            if beat == 10:
                print("began")
    print("ended")


def test_a_suspended_process_goes_on(tmp_path):
    """As after Ctrl-Z, or where a batch system runs another job for a while: longer than any limit."""
    forks = Forks(guarded, tmp_path, False, log=tmp_path / "log")
    while forks.said() != "began\n":
        forks.reap()
        assert forks.running, forks.said()
        time.sleep(0.02)
    forks.signal(signal.SIGSTOP)
    time.sleep(6)
    forks.signal(signal.SIGCONT)
    assert forks.wait() == ([0], "began\nended\n")


def test_a_process_without_python_ends_with_its_stacks(tmp_path):
    codes, output = Forks(guarded, tmp_path, True, log=tmp_path / "log").wait(120)
    stacks = tmp_path / "stacks/rank-0.txt"
    assert codes == [1]
    assert re.fullmatch(rf"error: rank 0 on \S+: no thread of Python ran; the stacks are in {stacks}\n", output)
    assert f'"{__file__}", line {guarded.__code__.co_firstlineno + 7} in guarded' in stacks.read_text()


def test_stacks_of_an_earlier_start_stay(tmp_path):
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks/rank-0.txt").write_text("of an earlier start\n")
    for rank in (0, 1):
        with Watchdog(tmp_path, Topology(rank, 1, rank, 1, torch.device("cpu")), HashStore(), 600):
            pass
    (left,) = (tmp_path / "stacks").iterdir()
    assert left.read_text() == "of an earlier start\n"


class GoneStore:
    """Of a host that has gone."""

    def fails(self, *_):
        raise RuntimeError("Connection reset by peer\nand a long story")

    set = check = get = compare_set = fails


def test_a_store_that_has_gone_is_a_failure(tmp_path):
    topology = Topology(1, 2, 1, 2, torch.device("cpu"))
    guard = Watchdog(tmp_path, topology, GoneStore(), 600)
    guard._exchange_heartbeats()
    assert guard._failure == "the process group's store is unreachable: Connection reset by peer"
    assert guard._report_failure("another") == guard._failure
    store = HashStore()
    guard = Watchdog(tmp_path, topology, store, 600)
    guard._stopped.set()
    guard._exchange_heartbeats()
    assert store.get("alive 1") == b"done"
    assert guard._failure is None
    assert [guard._report_failure(reason) for reason in ("first", "second")] == ["first", "first"]


@pytest.mark.parametrize(("reported", "world"), [(True, 2), (False, 2), (False, 1)])
def test_a_rank_without_the_store_or_another_rank_ends(tmp_path, monkeypatch, reported, world):
    """Though its own steps come in time, and with the first reason."""
    now, ended = 1000.0, []
    clock = SimpleNamespace(monotonic=lambda: now, strftime=time.strftime, sleep=time.sleep)
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(watchdog, "GRACE_PERIOD", 0.01)
    monkeypatch.setattr(watchdog, "HEARTBEAT_TIMEOUT", 2.0)
    guard = Watchdog(tmp_path, Topology(world - 1, world, 0, 1, torch.device("cpu")), HashStore(), 0.5)
    monkeypatch.setattr(guard, "_exchange_heartbeats", lambda: None)
    monkeypatch.setattr(guard, "_begin_countdown", lambda: None)
    monkeypatch.setattr(guard, "_exit_with_stacks", lambda reason: (ended.append(reason), guard._stopped.set()))
    guard._failure = "rank 0 has failed" if reported else None

    def wait(seconds):
        nonlocal now
        now += 0.25
        guard.beat()
        return bool(ended) or now > 1010

    monkeypatch.setattr(guard._stopped, "wait", wait)
    guard._check_progress()
    if reported:
        assert ended == ["rank 0 has failed"]
    elif world == 1:
        assert not ended  # it has nobody to hear from
    else:
        assert ended == [f"{guard._name} had no answer from the store for 2 s"]
        assert 1002 < now < 1003
