"""torchrun in a job: a signal reaches the ranks, which save before it ends, with its own options or without."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import PContext, SignalException

from tests.forks import Forks, free_port
from widemix.errors import InputError
from widemix.launch import torchrun
from widemix.launch.relay import Relay
from widemix.versions import TORCHRUN_STOPS_RANKS, torch_is_at_least

RANK = """
import os, signal, sys, time
def save(number, _):
    time.sleep(1)
    os.write(1, f"saved after {signal.Signals(number).name}".encode())
    sys.exit(0)
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, save)
os.write(1, b"up ")
time.sleep(600)
"""


def be_node(options: str) -> None:
    """Start RANK by torchrun, and say when it is watched: before that, a signal would miss the rank."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    wait = PContext.wait

    def watch(*arguments):
        PContext.wait = wait
        os.write(1, b"watched ")
        return wait(*arguments)

    PContext.wait = watch
    if options == "without":
        torchrun.torch_is_at_least = lambda _: False
    rank = ["--no-python", sys.executable, "-c", RANK]
    torchrun.run_torchrun(["--standalone", *torchrun.stop_options(), *rank])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("options", ["with", "without"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_lets_the_ranks_save(options, number, tmp_path):
    """Without: as with the oldest torch, whose torchrun does not know SIGUSR1."""
    if options == "with" and not torch_is_at_least(TORCHRUN_STOPS_RANKS):
        pytest.skip("this torchrun has no such options")
    node = Forks(be_node, options, log=tmp_path / "log")
    deadline = time.monotonic() + 300
    while len(node.said()) < len("up watched "):
        assert node.running
        assert time.monotonic() < deadline, node.said()
        node.reap()
        time.sleep(0.02)
    begun = node.said()
    assert sorted(begun.split()) == ["up", "watched"]
    node.signal(number)
    node.wait()
    assert node.said() == f"{begun}saved after {number.name}"


@pytest.mark.parametrize("version", ["2.12.0", "2.11.0"])
def test_torchrun_forwards_all_signals_and_waits(version, system, tmp_path, monkeypatch):
    """An older one, which has no options for it, is made to: SIGUSR1 it does not know, and it waits for 30 s."""

    def close(self, death_sig=None, timeout=30):
        pass

    def ended(words):
        ran.append((words, os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"], signal.getsignal(signal.SIGUSR1)))
        raise SignalException("torchrun got SIGTERM", signal.SIGTERM)

    ran: list[tuple] = []
    (tmp_path / "torch-0.dist-info").mkdir()
    (tmp_path / "torch-0.dist-info/METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    system({"torch.distributed.run.main": ended, "torch.distributed.elastic.multiprocessing.PContext.close": close})
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "")
    before = signal.getsignal(signal.SIGUSR1)
    try:
        torchrun.run_torchrun(("--standalone", "x"))
        [(words, alone, handler)] = ran
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (words, alone) == (["--standalone", "x"], "1")
    options = torchrun.stop_options()
    if version == "2.12.0":
        forwarded, seconds = options[1::2]
        assert options[::2] == ["--signals-to-handle", "--shutdown-timeout"]
        assert {*forwarded.split(",")} == {"SIGUSR1", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"}
        assert (handler, close.__defaults__) == (before, (None, 30))
    else:
        assert options == []
        with pytest.raises(SignalException, match="SIGUSR1") as raised:
            handler(signal.SIGUSR1, None)
        assert raised.value.sigval == signal.SIGUSR1
        number, seconds = close.__defaults__
        assert number is None
    assert 240 < int(seconds) < 300  # of which jobs have 300 until they are killed


def test_data_are_read_where_they_are_or_copied(digits, tmp_path, monkeypatch):
    """To a folder of this node."""
    monkeypatch.setenv("OF_NODE", str(tmp_path))
    train = ["digits/mixer", "--data.path", str(digits), "--run-dir", "r"]
    assert torchrun.data_for(train, "") == digits
    copy = torchrun.data_for(train, "$OF_NODE/a")
    assert copy.parent == tmp_path / "a"
    with Relay(None, free_port(), "token") as relay:
        assert torchrun.data_for(train, str(tmp_path / "a"), relay) == copy
        assert relay.wait_for("train.beton", 0) is not None  # it serves the copy
    program = torchrun.train_program(train, Path("/disk/7/a"))
    assert program == ["widemix", "train", *train, "--data.path=/disk/7/a"]  # of two paths the last one counts
    monkeypatch.setenv("OF_NODE", "disk")
    with pytest.raises(InputError, match=r"^--stage-to \$OF_NODE/a: is disk/a on this node"):
        torchrun.data_for(train, "$OF_NODE/a")
