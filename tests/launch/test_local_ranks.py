"""Ranks that `widemix train --ranks` starts, and the signals that they are passed."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from widemix.errors import InputError
from widemix.launch.local import FAILURE_TIMEOUT_S, STOP_TIMEOUT_S, launch


def test_a_signal_while_ranks_start_reaches_all(system):
    start = subprocess.Popen

    def signalled_here(*arguments, **options):
        worker = start(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return worker

    system({"subprocess.Popen": signalled_here})
    assert launch(["-c", "import time; time.sleep(600)"], 2) == 128 + signal.SIGTERM


class Rank:
    """In place of a rank's process: it ends with a code after so many polls."""

    def __init__(self, code: int | None, polls: int, command, env, preexec_fn):
        self._code, self._polls = code, polls
        self.command, self.env, self.prepare, self.done = command, env, preexec_fn, []

    def poll(self) -> int | None:
        self._polls -= 1
        return None if self._polls >= 0 else self._code

    def send_signal(self, number: int) -> None:
        self.done.append(number)

    def kill(self) -> None:
        self.done.append("kill")

    def wait(self) -> None:
        self.done.append("wait")


@pytest.fixture
def ranks(system, monkeypatch):
    """Launch ranks that end so: ranks((code, polls), ..., between=what happens between two polls) -> code, ranks.

    The code is None where Ctrl-C ended them. ranks.seconds is how long that took.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in signals}  # also where some were ignored

    def run(*ends: tuple[int | None, int], between: Callable = lambda: None) -> tuple[int | None, list[Rank]]:
        now, started, left = [1000.0], [], iter(ends)

        def sleep(seconds: float) -> None:
            now[0] += seconds
            between()

        def start(command, **options) -> Rank:
            started.append(Rank(*next(left), command, **options))
            return started[-1]

        system({"subprocess.Popen": start, "time.sleep": sleep, "time.monotonic": lambda: now[0]})
        try:
            code = launch(["-m", "widemix", "train"], len(ends))
        except KeyboardInterrupt:
            code = None
        assert {signal.getsignal(number) for number in signals} == {signal.SIG_DFL}
        run.seconds = now[0] - 1000
        return code, started

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        # The others fail since one was killed.
        *(([(1, late), (-9, late)], 128 + 9, "error: rank 1 was killed by SIGKILL\n") for late in (0, 3)),
        ([(-9, 0), (1, 0)], 128 + 9, "error: rank 0 was killed by SIGKILL\n"),
        ([(1, 3), (0, 3), (-11, 3), (1, 3)], 128 + 11, "error: rank 2 was killed by SIGSEGV\n"),
        *(([(0, late), (1, late)], 1, "") for late in (0, 3)),
        ([(75, 0), (75, 0)], 75, ""),
        ([(0, 3), (2, 3), (0, 3)], 2, ""),
        ([(0, 0), (0, 3)], 0, ""),
        # The first that fails is the cause, whatever the others end with later.
        ([(-9, 3), (75, 1), (1, 2)], 75, ""),
        ([(0, 0), (3, 4), (2, 5)], 3, ""),
    ],
)
def test_the_exit_code_is_that_of_the_cause(ends, code, said, ranks, capfd):
    found, started = ranks(*ends)
    assert found == code
    assert capfd.readouterr().err == said
    assert [rank.done for rank in started] == [["kill", "wait"]] * len(ends)  # whatever they do


@pytest.mark.parametrize(
    ("code", "seconds"), [(75, STOP_TIMEOUT_S), (1, FAILURE_TIMEOUT_S), (120, FAILURE_TIMEOUT_S)]
)
def test_ranks_that_hang_are_waited_for(code, seconds, ranks):
    """Longer if another has saved a checkpoint."""
    assert ranks((code, 0), (None, 0))[0] == code
    assert ranks.seconds == pytest.approx(seconds, abs=0.1)


def test_a_closed_terminal_hides_a_killed_rank(ranks, system):
    """The others are waited for all the same."""

    def closed(*_, **__) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    system({"builtins.print": closed})
    code, (other, _) = ranks((1, 3), (-9, 0))
    assert (code, other.poll()) == (128 + 9, 1)


def test_each_rank_is_told_its_place(ranks, monkeypatch):
    for name, value in (("MASTER_ADDR", "of another job"), ("RANK", "7"), ("OF_THE_USER", "kept")):
        monkeypatch.setenv(name, value)
    code, started = ranks((0, 0), (0, 0), (0, 0))
    assert code == 0
    ports = {int(rank.env["MASTER_PORT"]) for rank in started}
    assert len(ports) == 1
    assert 20_000 <= ports.pop() < 32_000  # that the kernel gives to nobody
    for number, rank in enumerate(started):
        assert rank.command == [sys.executable, "-m", "widemix", "train"]
        same = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "OF_THE_USER": "kept"}
        place = {"RANK": str(number), "LOCAL_RANK": str(number), "MASTER_PORT": rank.env["MASTER_PORT"]}
        assert rank.env == os.environ | same | place
        assert callable(rank.prepare)


@pytest.mark.parametrize(("cpus", "most"), [(3, 16), (20, 20)])
def test_more_ranks_than_cpus_are_refused(cpus, most, ranks, system):
    """But sixteen may always be tried."""

    def no_quota(*_, **__) -> str:
        raise FileNotFoundError

    system({"os.sched_getaffinity": lambda _: set(range(cpus)), "pathlib.Path.read_text": no_quota})
    assert ranks(*[(0, 0)] * most)[0] == 0
    said = rf"^--ranks {most + 1}: at most {most} on this machine, which has {cpus} usable CPUs$"
    with pytest.raises(InputError, match=said):
        ranks(*[(0, 0)] * (most + 1))


@pytest.mark.parametrize(
    ("numbers", "end", "passed", "code"),
    [
        ([signal.SIGINT], -signal.SIGTERM, signal.SIGTERM, None),  # a second SIGINT would interrupt saving
        ([signal.SIGINT], -signal.SIGINT, signal.SIGTERM, None),
        ([signal.SIGINT], 75, signal.SIGTERM, 75),
        ([signal.SIGINT], 1, signal.SIGTERM, 1),
        ([signal.SIGQUIT], 75, signal.SIGTERM, 75),
        ([signal.SIGUSR1], 75, signal.SIGUSR1, 75),
        ([signal.SIGUSR1], -signal.SIGTERM, signal.SIGUSR1, 128 + signal.SIGTERM),
        ([signal.SIGHUP], 75, signal.SIGHUP, 75),
        # Whatever signal follows Ctrl-C, as that of a job at its time limit.
        ([signal.SIGINT, signal.SIGUSR1], -signal.SIGTERM, signal.SIGTERM, None),
    ],
)
def test_signals_are_passed_on(numbers, end, passed, code, ranks, system):
    """Ctrl-C is one where no rank answered it. What was printed on a terminal that is closed goes nowhere."""
    left: list[tuple] = []
    system(
        {"os.dup2": lambda *words: left.append(words), "os.isatty": lambda _: False, "stat.S_ISCHR": lambda _: True}
    )
    found, started = ranks((end, 1), (end, 1), between=lambda: [signal.raise_signal(number) for number in numbers])
    assert found == code
    assert [rank.done for rank in started] == [[passed, *numbers[1:], "kill", "wait"]] * 2
    assert {descriptor for _, descriptor in left} == {0, 1, 2}
