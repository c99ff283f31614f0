"""torchrun in a job: a signal reaches the ranks, which save before it ends, with its own options or without."""

import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from widemix.torch_support import TORCHRUN_STOPS_RANKS, torch_is_at_least

# torchrun forgets ranks that it has started but not noted yet when a signal comes: so it says when it watches them.
NODE = """
import os, sys
import widemix.launch.torchrun
from torch.distributed.elastic.multiprocessing import PContext
wait = PContext.wait
def watch(*arguments):
    PContext.wait = wait
    os.write(1, b"watched ")
    return wait(*arguments)
PContext.wait = watch
if sys.argv[1] == "without":
    widemix.launch.torchrun.torch_is_at_least = lambda _: False
rank = ["--no-python", sys.executable, "-c", sys.argv[2]]
widemix.launch.torchrun.run_torchrun(["--standalone", *widemix.launch.torchrun.stop_options(), *rank])
"""
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


@pytest.mark.one_in(5)
@pytest.mark.parametrize("options", ["with", "without"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_lets_the_ranks_save(options, number):
    """Without: as with the oldest torch, whose torchrun does not know SIGUSR1."""
    if options == "with" and not torch_is_at_least(TORCHRUN_STOPS_RANKS):
        pytest.skip("this torchrun has no such options")
    command = [sys.executable, "-c", NODE, options, RANK]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert sorted(process.stdout.read(11).split()) == [b"up", b"watched"]
        process.send_signal(number)
        assert process.stdout.read().decode() == f"saved after {number.name}"
        process.wait(600)
