"""Start ranks on this machine, as torchrun does on one node, but pass on their exit code and signals to them.

As a program it prints this machine's free ports for all that a job starts; train.sbatch hands them on to the nodes.
"""

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from widemix.cgroups import usable_cpus
from widemix.cli.arguments import Parser
from widemix.cli.commands import run_command
from widemix.distributed.launchers import PORTS, USES, job_port
from widemix.errors import Exit, InputError, RunError
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


def free_ports(job: int) -> dict[str, int]:
    """Return a port of this machine for each of USES: the job's own, or the next one that is free.

    Raises `RunError` if there is none.
    """
    ports: dict[str, int] = {}
    for use in USES:
        first = PORTS.index(job_port(job, use))
        # In steps of all uses, so that two uses never meet.
        candidates = (PORTS[(first + len(USES) * number) % len(PORTS)] for number in range(len(PORTS) // len(USES)))
        found = next((port for port in candidates if is_free(port)), None)
        if found is None:
            raise RunError(f"this node has no free port from {PORTS[0]} to {PORTS[-1]}")
        ports[use] = found
    return ports


def is_free(port: int) -> bool:
    """Whether a server of this process could listen on all addresses, IPv4 and IPv6."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # this machine has no IPv6
            continue
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: what has just ended is free
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((address, port))
            except OSError:
                return False
    return True


def _print_ports(arguments: argparse.Namespace) -> Exit:
    print(",".join(str(port) for port in free_ports(arguments.job).values()))
    return Exit.DONE


def main() -> None:
    """Run on the first node of a job, before srun."""
    parser = Parser(prog="python -m widemix.launch.local", description="Print free ports of this machine.")
    parser.add_argument("job", type=int, help="the job's number")
    sys.exit(run_command(parser, _print_ports))


if __name__ == "__main__":
    main()
