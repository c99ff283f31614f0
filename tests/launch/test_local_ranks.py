"""Ranks that `widemix train --ranks` starts, and the signals that they are passed."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT
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
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
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


@pytest.mark.parametrize(("code", "seconds"), [(75, local.STOP_TIMEOUT_S), (1, local.FAILURE_TIMEOUT_S)])
def test_ranks_that_hang_are_waited_for_longer_if_another_has_saved_a_checkpoint(code, seconds, monkeypatch):
    clock = [1000.0]

    def sleep(pause):
        clock[0] += pause

    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    assert local._wait([Ended(code, 0), Ended(None, 0)]) == code
    assert clock[0] - 1000 == pytest.approx(seconds, abs=0.1)
