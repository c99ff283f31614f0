"""Ranks on this machine: what torchrun does on one node, but exit codes come through and a signal reaches all."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

GRACE = 60.0  # seconds that the other ranks have to end after one has stopped on purpose, before they are killed
PATIENCE = 10.0  # and if it failed: time enough to write the stacks of a hang
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def launch(command: Sequence[str], ranks: int) -> int:
    """Run `python COMMAND` once a rank; the first exit code that is not 0, or 0."""
    environ = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    workers = [
        subprocess.Popen([sys.executable, *command], env=environ | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(ranks)
    ]

    def forward(number: int, _frame) -> None:
        for worker in workers:
            # A terminal's Ctrl-C has reached them already, and a second one would cut the checkpoint short.
            worker.send_signal(signal.SIGTERM if number == signal.SIGINT else number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        return _wait(workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(workers: list[subprocess.Popen]) -> int:
    """Wait for all; once one has failed the others, who wait for it in vain, have `GRACE` seconds."""
    code, deadline = 0, float("inf")
    while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
        failed = [(rank, worker.returncode) for rank, worker in enumerate(workers) if worker.returncode]
        if failed and not code:
            rank, code = min(failed, key=lambda each: each[1])  # those that a signal ended first: the others follow
            deadline = time.monotonic() + (GRACE if code == 75 else PATIENCE)
            if code < 0:
                print(f"error: rank {rank} was ended by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
        time.sleep(0.05)
    codes = [worker.poll() for worker in workers]
    code = code or next((c for c in codes if c), 0)
    return 128 - code if code < 0 else code


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
