"""Ranks that `widemix train --ranks` starts, and the signals that they are passed."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.clone import CLONE
from widemix.errors import InputError
from widemix.launch import local

RANKS = """
import signal, sys, time
from widemix.launch.local import launch
rank = f"import os, signal, sys, time; {sys.argv[1]}; os.write(1, b'up'); time.sleep(600)"
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
try:
    sys.exit(launch(["-c", rank], 2))
except KeyboardInterrupt:
    sys.exit(5)
"""
READY = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))"


@pytest.mark.parametrize(
    ("handler", "number", "code"),
    [
        ("pass", signal.SIGINT, 5),
        ("pass", signal.SIGTERM, 128 + signal.SIGTERM),
        (READY, signal.SIGINT, 75),
        (READY, signal.SIGTERM, 75),
    ],
    ids=["Ctrl-C early", "SIGTERM early", "Ctrl-C", "SIGTERM"],
)
def test_a_signal_ends_the_ranks_and_ctrl_c_is_one_before_they_can_answer_it(handler, number, code):
    command = [sys.executable, "-c", RANKS, handler]
    with subprocess.Popen(command, cwd=CLONE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == "upup"
        process.send_signal(number)
        assert process.wait(300) == code


def test_a_signal_while_ranks_are_started_reaches_all(monkeypatch):
    start = subprocess.Popen

    def signalled_here(*arguments, **options):
        worker = start(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return worker

    monkeypatch.setattr(local.subprocess, "Popen", signalled_here)
    assert local.launch(["-c", "import time; time.sleep(600)"], 2) == 128 + signal.SIGTERM


class Ended:
    """A rank that ends after so many polls."""

    def __init__(self, code: int | None, polls: int):
        self._code, self._polls = code, polls

    def poll(self) -> int | None:
        self._polls -= 1
        return None if self._polls >= 0 else self._code


@pytest.mark.parametrize(
    ("codes", "code", "said"),
    [
        ([1, -9], 128 + 9, "error: rank 1 was killed by SIGKILL\n"),  # the others fail since one was killed
        ([-9, 1], 128 + 9, "error: rank 0 was killed by SIGKILL\n"),
        ([1, 0, -11, 1], 128 + 11, "error: rank 2 was killed by SIGSEGV\n"),
        ([0, 1], 1, ""),
        ([75, 75], 75, ""),
        ([0, 2, 0], 2, ""),
        ([0, 0], 0, ""),
    ],
)
@pytest.mark.parametrize("late", [0, 3])
def test_the_exit_code_is_that_of_the_cause(codes, code, said, late, capfd, monkeypatch):
    monkeypatch.setattr(local.time, "sleep", lambda seconds: None)
    assert local._wait([Ended(each, late) for each in codes]) == code
    assert capfd.readouterr().err == said


@pytest.mark.parametrize(
    ("code", "seconds"),
    [(75, local.STOP_TIMEOUT_S), (1, local.FAILURE_TIMEOUT_S), (120, local.FAILURE_TIMEOUT_S)],
)
def test_ranks_that_hang_are_waited_for_longer_if_another_has_saved_a_checkpoint(code, seconds, monkeypatch):
    clock = [1000.0]

    def sleep(pause):
        clock[0] += pause

    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    assert local._wait([Ended(code, 0), Ended(None, 0)]) == code
    assert clock[0] - 1000 == pytest.approx(seconds, abs=0.1)


def test_a_killed_rank_that_cannot_be_told_of_ends_the_others_all_the_same(monkeypatch):
    def closed(*_, **__):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("builtins.print", closed)
    monkeypatch.setattr(local.time, "sleep", lambda seconds: None)
    others = [Ended(1, 3), Ended(-9, 0)]
    assert local._wait(others) == 128 + 9
    assert others[0].poll() == 1


def test_the_first_that_fails_is_the_cause_whatever_the_others_end_with_later(monkeypatch, capfd):
    monkeypatch.setattr(local.time, "sleep", lambda seconds: None)
    assert local._wait([Ended(-9, 3), Ended(75, 1), Ended(1, 2)]) == 75
    assert local._wait([Ended(0, 0), Ended(3, 4), Ended(2, 5)]) == 3
    assert capfd.readouterr().err == ""


class Worker:
    """A rank in place of a process, which ends with a code when it is waited for."""

    code: int | None = 0

    def __init__(self, command, env, preexec_fn):
        self.command, self.env, self.preexec_fn, self.done = command, env, preexec_fn, []

    def poll(self):
        return self.code

    def send_signal(self, number):
        self.done.append(number)

    def kill(self):
        self.done.append("kill")

    def wait(self):
        self.done.append("wait")


@pytest.fixture
def workers(monkeypatch):
    """The ranks that were started."""
    started: list[Worker] = []

    def start(*given, **options):
        started.append(Worker(*given, **options))
        return started[-1]

    monkeypatch.setattr(local.subprocess, "Popen", start)
    monkeypatch.setattr(local, "usable_cpus", lambda: 3)
    monkeypatch.setattr(local, "end_with_parent", lambda: "ends with its parent")
    monkeypatch.setattr(Worker, "code", 0)
    return started


def test_each_rank_is_told_its_place_and_where_all_meet(workers, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "of another job")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("OF_THE_USER", "kept")
    monkeypatch.setattr(local, "free_ports", lambda job: {"train": 20_007, "preflight": 1, "rendezvous": 2})
    handlers = [signal.getsignal(number) for number in local.stop_signals()]
    assert local.launch(["-m", "widemix", "train"], 3) == 0
    assert [signal.getsignal(number) for number in local.stop_signals()] == handlers
    for rank, worker in enumerate(workers):
        assert worker.command == [sys.executable, "-m", "widemix", "train"]
        same = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "20007", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OF_THE_USER": "kept"}
        assert worker.env == os.environ | same | place
        assert worker.preexec_fn == "ends with its parent"
        assert worker.done == ["kill", "wait"]  # whatever it does
    assert len(workers) == 3


def test_more_ranks_than_cpus_are_refused_but_sixteen_may_always_be_tried(workers, monkeypatch):
    assert local.launch(["-c", ""], 16) == 0
    with pytest.raises(InputError, match=r"^--ranks 17: at most 16 on this machine, which has 3 usable CPUs$"):
        local.launch(["-c", ""], 17)
    monkeypatch.setattr(local, "usable_cpus", lambda: 20)
    assert local.launch(["-c", ""], 20) == 0
    with pytest.raises(InputError, match="--ranks 21: at most 20"):
        local.launch(["-c", ""], 21)
    assert len(workers) == 36


@pytest.mark.parametrize(
    ("number", "code", "passed", "ends"),
    [
        (signal.SIGINT, 128 + signal.SIGTERM, signal.SIGTERM, None),  # a second SIGINT would interrupt saving
        (signal.SIGINT, 128 + signal.SIGINT, signal.SIGTERM, None),
        (signal.SIGINT, 75, signal.SIGTERM, 75),
        (signal.SIGINT, 1, signal.SIGTERM, 1),
        (signal.SIGQUIT, 75, signal.SIGTERM, 75),
        (signal.SIGUSR1, 75, signal.SIGUSR1, 75),
        (signal.SIGUSR1, 128 + signal.SIGTERM, signal.SIGUSR1, 128 + signal.SIGTERM),
        (signal.SIGHUP, 75, signal.SIGHUP, 75),
    ],
)
def test_signals_are_passed_on_and_ctrl_c_is_one_where_no_rank_answered_it(
    workers, number, code, passed, ends, monkeypatch
):
    left, polls = [], iter([None, None])

    def poll(worker):
        return next(polls, code if code < 128 else 128 - code)

    known = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
    monkeypatch.setattr(local, "stop_signals", lambda: known)  # also where the tests were started with some ignored
    monkeypatch.setattr(local, "leave_closed_terminal", lambda: left.append("left"))
    monkeypatch.setattr(Worker, "poll", poll)
    monkeypatch.setattr(local.time, "sleep", lambda seconds: signal.raise_signal(number))
    try:
        found = local.launch(["-c", ""], 2)
    except KeyboardInterrupt:
        found = None
    assert found == ends
    assert left == ["left"]
    assert [worker.done for worker in workers] == [[passed, "kill", "wait"]] * 2


def test_ctrl_c_is_one_whatever_signal_follows(workers, monkeypatch):
    """As that of a job at its time limit."""

    def both(seconds):
        for number in (signal.SIGINT, signal.SIGUSR1):
            signal.raise_signal(number)

    polls = iter([None])
    monkeypatch.setattr(local, "leave_closed_terminal", lambda: None)
    monkeypatch.setattr(Worker, "poll", lambda worker: next(polls, -signal.SIGTERM))
    monkeypatch.setattr(local.time, "sleep", both)
    with pytest.raises(KeyboardInterrupt):
        local.launch(["-c", ""], 1)
    assert [worker.done for worker in workers] == [[signal.SIGTERM, signal.SIGUSR1, "kill", "wait"]]
