"""What a rank that fails raises and leaves behind, where several share a run folder and a store."""

import ctypes
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from tests.forks import Forks
from widemix.distributed.rank_status import read_rank_statuses
from widemix.distributed.topology import Topology
from widemix.distributed.watchdog import HEARTBEAT_TIMEOUT, LONGEST_GAP, Watchdog
from widemix.errors import InputError, RunError

WORLD = 2


def watchdog(run_dir: Path, rank: int, world: int, store=None, timeout_s: float = 600, **others) -> Watchdog:
    """That of a rank, which looks and sends more often than those of runs, and does not end pytest."""
    topology = Topology(rank, world, rank, world, torch.device("cpu"))
    fast = {"interval_s": 0.01, "grace_s": 600.0} | others
    return Watchdog(run_dir, topology, store or HashStore(), timeout_s, **fast)


def raised_by(guard: Watchdog, error: BaseException | None) -> BaseException | None:
    """What leaves a watchdog when this is raised within it."""
    try:
        guard.__exit__(type(error) if error else None, error, None)
    except RuntimeError as other:
        return other
    return error


INTERRUPT, FULL = KeyboardInterrupt(), "the disk is full"
CLOSED = OSError("connection closed")


@pytest.mark.parametrize(
    ("first", "second", "instead"),
    [
        (InputError("no such key"), InputError("no such key"), None),
        (RuntimeError("the loss is nan"), RuntimeError("the loss is nan"), None),  # of all ranks: not repeated
        (InputError("no data here"), CLOSED, "no data here; so this rank ends (connection closed)"),
        (OSError(f"{FULL}, says it"), OSError(FULL), f"{FULL}, says it; so this rank ends ({FULL})"),
        (INTERRUPT, CLOSED, "interrupted; so this rank ends (connection closed)"),
        (INTERRUPT, KeyboardInterrupt(), None),
        (OSError("no"), INTERRUPT, None),
    ],
)
def test_a_rank_ends_with_the_reason_of_the_first(tmp_path, first, second, instead):
    store = HashStore()
    guards = [watchdog(tmp_path, rank, WORLD, store) for rank in range(WORLD)]
    for guard in guards:
        guard.__enter__()
    errors = [raised_by(guard, error) for guard, error in zip(guards, (first, second), strict=True)]
    assert not (tmp_path / "stacks").exists()
    assert errors[0] is first
    if instead is None:
        assert errors[1] is second
    else:
        assert re.fullmatch(rf"rank 0 on \S+: {re.escape(instead)}", str(errors[1]))


def test_nothing_of_a_watchdog_outlives_its_block(tmp_path):
    store, before = HashStore(), set(threading.enumerate())
    with watchdog(tmp_path, 1, WORLD, store):
        assert {thread.name for thread in set(threading.enumerate()) - before} == {"watchdog", "heartbeats"}
    assert set(threading.enumerate()) <= before
    assert store.get("alive 1") == b"done"
    with pytest.raises(FileNotFoundError):
        watchdog(tmp_path / "moved", 0, 1).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_removes_no_folder_that_another_uses(tmp_path, system):
    """Each removes the folder of stacks if it is empty, also just after another has made it."""
    made, mkdir = [], Path.mkdir

    def and_removed_by_another(path, *arguments, **options):
        mkdir(path, *arguments, **options)
        if path == tmp_path / "stacks":
            made.append(path)
            if len(made) == 1:
                path.rmdir()

    system({"pathlib.Path.mkdir": and_removed_by_another})
    with watchdog(tmp_path, 0, 1):
        assert (tmp_path / "stacks/rank-0.txt").exists()
    assert len(made) == 2
    assert list(tmp_path.iterdir()) == []


def test_stacks_of_an_earlier_start_stay(tmp_path):
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks/rank-0.txt").write_text("of an earlier start\n")
    for rank in (0, 1):
        with watchdog(tmp_path, rank, 1):
            pass
    (left,) = (tmp_path / "stacks").iterdir()
    assert left.read_text() == "of an earlier start\n"


@pytest.mark.parametrize("beats", [0, 4])
def test_rank_0_reports_a_silent_rank_to_others(tmp_path, system, beats):
    """Not one that sends heartbeats, nor one that has ended; the last of four sends some, or none at all."""
    now, store = 1000.0, HashStore()
    system({"time.monotonic": lambda: now})
    store.set("alive 2", "done")
    guards = [watchdog(tmp_path, rank, 4, store) for rank in range(2)]
    for guard in guards:
        guard.__enter__()
    for number in range(100):
        if number < beats:
            store.set("alive 3", f"{number}")
        for cleared in ([], [0], [0]):  # rank 1 has sent this time, then rank 0 has looked once more
            for rank in cleared:
                store.set(f"alive {rank}", "")
            sent = str(now).encode()
            while not (all(store.get(f"alive {rank}") == sent for rank in range(2)) or store.check(["failure"])):
                time.sleep(0.001)
        if store.check(["failure"]):
            break
        now += LONGEST_GAP
    assert store.get("failure").decode() == f"rank 3 has sent no heartbeat for {HEARTBEAT_TIMEOUT:g} s"
    last = 1000 + LONGEST_GAP * max(0, beats - 1)
    assert last + HEARTBEAT_TIMEOUT < now <= last + HEARTBEAT_TIMEOUT + 3 * LONGEST_GAP
    assert str(raised_by(guards[1], CLOSED)).startswith("rank 3 has sent no heartbeat")
    guards[0].__exit__(None, None, None)


class GoneStore:
    """Of a host that has gone."""

    def fails(self, *_):
        raise RuntimeError("Connection reset by peer\nand a long story")

    set = check = get = compare_set = fails


def test_a_store_that_has_gone_is_a_failure(tmp_path):
    guard = watchdog(tmp_path, 1, WORLD, GoneStore())
    guard.__enter__()
    error = raised_by(guard, CLOSED)
    assert isinstance(error, RunError)
    gone = "the process group's store is unreachable: Connection reset by peer"
    assert str(error) == f"{gone}; so this rank ends (connection closed)"


class DeadStore(HashStore):
    """Of a host that does not answer any more."""

    def check(self, keys):
        time.sleep(600)


def guarded(folder: Path) -> None:
    """Be a rank whose main thread beats in time for four seconds; or hangs, or another one fails."""
    how = os.environ["HOW"]
    run_dir, store = folder / how, DeadStore() if how == "no answer" else HashStore()
    run_dir.mkdir()
    if how == "reported":
        store.set("failure", "rank 0 has failed")
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    world = 1 if how in ("alone", "suspended", "holds the GIL", "hangs") else 2
    with watchdog(run_dir, world - 1, world, store, timeout_s=1.0, silence_s=2.0, grace_s=0.5) as guard:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == blocked  # Ctrl-C and Slurm's signals arrive
        if how == "holds the GIL":
            ctypes.PyDLL(None).sleep(600)
        for beat in range(40):
            time.sleep(0.1)
            guard.beat()
            if beat == 10:
                print("began")
            if beat == 20 and how == "hangs":
                time.sleep(600)
    print("ended")


def start(folder: Path, how: str) -> Forks:
    environ = {"HOW": how, "RANK": "0", "WIDEMIX_RANK_STATUS_DIR": f"{folder}/status"}
    return Forks(guarded, folder, log=folder / "log", environs=[environ])


def test_a_suspended_process_goes_on(tmp_path):
    """As after Ctrl-Z, or where a batch system runs another job for a while: longer than any limit."""
    forks = start(tmp_path, "suspended")
    while forks.said() != "began\n":
        forks.reap()
        assert forks.running, forks.said()
        time.sleep(0.02)
    forks.signal(signal.SIGSTOP)
    time.sleep(6)
    forks.signal(signal.SIGCONT)
    assert forks.wait() == ([0], "began\nended\n")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("alone", None),
        ("hangs", r"rank 0 on \S+: no step or batch was finished in 1 s; the stacks are in {stacks}"),
        ("holds the GIL", r"rank 0 on \S+: no thread of Python ran; the stacks are in {stacks}"),
        ("no answer", r"rank 1 on \S+ had no answer from the store for 2 s"),
        ("reported", "rank 0 has failed"),
    ],
)
def test_a_rank_that_cannot_go_on_ends_with_its_stacks(tmp_path, how, said):
    """Though its own steps come in time, where another rank has failed or the store does not answer."""
    codes, output = start(tmp_path, how).wait(120)
    stacks = tmp_path / how / "stacks" / f"rank-{int(how in ('no answer', 'reported'))}.txt"
    if said is None:
        assert (codes, output) == ([0], "began\nended\n")
        assert not list((tmp_path / how).iterdir())
        return
    assert codes == [1]
    said = said.format(stacks=stacks)
    assert re.fullmatch(rf"(began\n)?error: {said}\n", output)
    assert f'"{__file__}", line ' in stacks.read_text()
    assert " in guarded" in stacks.read_text()
    if how != "holds the GIL":
        (status,) = read_rank_statuses(tmp_path / "status")
        assert status.code == 1
        assert re.fullmatch(said, status.message)
        reason = stacks.read_text().partition("Thread 0x")[0]
        assert re.search(said, reason)
