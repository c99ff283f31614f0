"""torchrun over four hosts, one of them killed, cut off or late: training goes on with the undisturbed numbers.

`-rP` shows the seconds from each event to the next new step.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, SMALL, Command, train_lines
from tests.launch.hosts import Hosts, missing

REASON = missing()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(REASON), reason=REASON)]
# A batch that 2, 3 and 4 ranks divide.
BATCH = ("--train.global_batch", "96", "--augment.mix_group", "8")
BATCH += ("--train.epochs", "600", "--train.save_every_steps", "4")
LAST = 6 * (1437 // 96)  # step of most tests' runs, of the 8,400 that their schedule has


def words(digits: Path, run: Path, last: int = LAST) -> list[str]:
    given = ("recipes/digits/rp_mixer.yaml", "--data.path", digits, "--run-dir", run, *SMALL, *BATCH)
    given += ("--train.max_steps", last)
    return [str(word) for word in (*given, "--engine.timeout_s", "40", "--faults.hang_timeout_s", "20")]


@pytest.fixture(scope="module")
def undisturbed(digits, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    code, output = Command("train", *words(digits, run)).wait(900)
    assert code == 0, output
    return run


@pytest.fixture
def hosts():
    found = Hosts(4)
    yield found
    found.stop()


class Training:
    """torchrun, started on the first hosts as launch/README.md says."""

    def __init__(self, hosts: Hosts, digits: Path, folder: Path, count: int = 4, last: int = LAST):
        self.run, self.log = folder / "run", folder / "log"
        self.agents: list[subprocess.Popen] = []
        self._hosts, self._words = hosts, words(digits, self.run, last)
        for _ in range(count):
            self.start_next()

    def start_next(self) -> None:
        """On the next host."""
        host = len(self.agents)
        environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = self._torchrun(self._hosts, host, self._words)
        self.agents.append(self._hosts.start(host, sys.executable, *command, log=self.log, **environ))

    def _torchrun(self, hosts: Hosts, host: int, train: list[str]) -> list[str]:
        fast = "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=2"
        return [
            *("-m", "torch.distributed.run", "--nnodes", "2:4", "--nproc-per-node", "1", "--max-restarts", "5"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.address(0)}:29500", "--rdzv-id", "test"),
            *("--rdzv-conf", f"is_host={int(host == 0)},{fast}", "--local-addr", hosts.address(host)),
            *("-m", "widemix", "train", *train),
        ]

    def wait_for_step(self, step: int, seconds: float = 600) -> float:
        """Seconds until the record has this step."""
        began = time.monotonic()
        while not any(line["step"] >= step for line in train_lines(self.run)):
            assert time.monotonic() - began < seconds, self.log.read_text()[-4000:]
            time.sleep(0.02)
        return time.monotonic() - began

    def steps(self) -> int:
        return max(line["step"] for line in train_lines(self.run))

    def stop(self) -> None:
        """SIGTERM to every torchrun: the ranks save and end."""
        for agent in self.agents:
            agent.terminate()
        for agent in self.agents:
            agent.wait(900)

    def finish(self, hosts: list[int]) -> None:
        for host in hosts:
            assert self.agents[host].wait(900) == 0, self.log.read_text()[-4000:]

    @property
    def ranks(self) -> int:
        return json.loads((self.run / "environment.json").read_text())["ranks"]


def assert_same_curve(run: Path, reference: Path, last: int = LAST) -> None:
    """The run has each step up to `last` once, and the losses of the reference as far as that goes."""
    found, expected = train_lines(run), train_lines(reference)
    assert [line["step"] for line in found] == list(range(1, last + 1))
    assert [line["step"] for line in expected] == list(range(1, LAST + 1))
    for ours, theirs in zip(found[:LAST], expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4), ours["step"]


@pytest.mark.parametrize("event", ["killed", "cut off"])
def test_the_others_continue_without_a_host_that_fails(hosts, digits, undisturbed, tmp_path, event):
    training = Training(hosts, digits, tmp_path)
    training.wait_for_step(15)
    assert training.ranks == 4
    before = training.steps()
    if event == "killed":
        hosts.kill(3)
    else:
        hosts.cut(3)
    began = time.monotonic()
    while training.ranks == 4:
        assert time.monotonic() - began < 600, training.log.read_text()[-4000:]
        time.sleep(0.02)
    training.wait_for_step(before + 2)
    print(f"host {event}: {time.monotonic() - began:.1f} s until step {before + 2} on {training.ranks} hosts")
    training.finish([0, 1, 2])
    assert training.ranks == 3
    assert_same_curve(training.run, undisturbed)


def test_training_goes_on_with_a_host_that_joins(hosts, digits, undisturbed, tmp_path):
    training = Training(hosts, digits, tmp_path, count=3, last=100 * LAST)  # it lasts until the host has joined
    training.wait_for_step(15)
    assert training.ranks == 3
    training.start_next()
    began = time.monotonic()
    while training.ranks == 3:
        assert time.monotonic() - began < 600, training.log.read_text()[-4000:]
        before = training.steps()
        time.sleep(0.02)
    print(f"host joined: {time.monotonic() - began:.1f} s until {training.ranks} hosts train")
    training.wait_for_step(max(LAST, before + 2))
    training.stop()
    assert training.ranks == 4
    begun = re.findall(r"at step (\d+) to \d+ steps on 4 ranks", training.log.read_text())
    assert int(begun[-1]) >= before > 15
    assert_same_curve(training.run, undisturbed, training.steps())


def test_a_killed_rank_is_restarted_and_all_hosts_with_it(hosts, digits, undisturbed, tmp_path):
    training = Training(hosts, digits, tmp_path)
    training.wait_for_step(15)
    before = training.steps()
    (rank,) = psutil.Process(training.agents[2].pid).children()
    rank.kill()
    print(f"rank killed: {training.wait_for_step(before + 2):.1f} s until step {before + 2}")
    training.finish([0, 1, 2, 3])
    assert training.ranks == 4
    assert_same_curve(training.run, undisturbed)
