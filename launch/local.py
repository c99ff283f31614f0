"""Start ranks on this machine, as torchrun does on one node, but pass on their exit code and signals to them."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from widemix.cgroups import usable_cpus
from widemix.errors import InputError
from widemix.launch.slurm.ports import free_ports
from widemix.processes import KEYS, end_with_parent, leave_closed_terminal, stop_signals
from widemix.terminal import print

# After one rank has ended with an exit code other than 0, the others are killed if they have not ended within:
STOP_TIMEOUT_S = 60.0  # after a stop with a checkpoint
FAILURE_TIMEOUT_S = 10.0  # after a failure: enough to write the stacks of a hang


def launch(command: Sequence[str], ranks: int) -> int:
    """Run `python COMMAND` on every rank, and wait for all.

    Returns the first exit code other than 0 (128 + N for signal N), or 0. The signals of `stop_signals` are
    forwarded; if this process is killed the ranks get SIGTERM. KeyboardInterrupt if Ctrl-C or Ctrl-\\ ended a rank
    that could not answer it yet.
    """
    most = max(16, usable_cpus())
    if ranks > most:
        raise InputError(f"--ranks {ranks}: at most {most} on this machine, which has {usable_cpus()} usable CPUs")
    environ = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        # No port that the kernel gives to whoever asks for any: rank 0 takes it seconds later.
        "MASTER_PORT": str(free_ports(secrets.randbelow(1 << 20))["train"]),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    end = end_with_parent()
    workers: list[subprocess.Popen] = []
    received: list[int] = []

    def forward(number: int, _frame) -> None:
        leave_closed_terminal()
        received.append(number)
        for worker in workers:
            _pass_on(number, worker)

    before = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            workers.append(subprocess.Popen([sys.executable, *command], env=environ | own, preexec_fn=end))
            for number in received:  # perhaps while it was started, when `forward` did not know it
                _pass_on(number, workers[-1])
        code = _wait(workers)
        if KEYS.keys() & received and code - 128 in (*KEYS, signal.SIGTERM):
            raise KeyboardInterrupt
        return code
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass_on(number: int, worker: subprocess.Popen) -> None:
    """Send a signal to a rank: SIGTERM for a terminal's, which sends it too; a second would interrupt saving."""
    worker.send_signal(signal.SIGTERM if number in KEYS else number)


def _wait(workers: list[subprocess.Popen]) -> int:
    """Wait for all ranks; after one has failed only until the time limit, since the others may wait for it."""
    code, deadline = 0, float("inf")
    while True:
        codes = [worker.poll() for worker in workers]
        failed = [(rank, own) for rank, own in enumerate(codes) if own]
        if failed and not code:
            rank, code = min(failed, key=lambda each: each[1])  # ranks killed by a signal first: the cause
            deadline = time.monotonic() + (STOP_TIMEOUT_S if code == 75 else FAILURE_TIMEOUT_S)
            if code < 0:
                with suppress(OSError):  # nothing reads it: the ranks are still to end in order
                    print(
                        f"error: rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr, flush=True
                    )
        if None not in codes or time.monotonic() >= deadline:
            return 128 - code if code < 0 else code
        time.sleep(0.05)
