"""Print free ports of a job's first node, for what all its nodes start; train.sbatch hands them on."""

import argparse
import socket
import sys

from widemix.command_line.arguments import Parser
from widemix.command_line.commands import run_command
from widemix.distributed.launchers import PORTS, USES, job_port
from widemix.errors import Exit, RunError
from widemix.terminal import print


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


def _print(arguments: argparse.Namespace) -> Exit:
    print(",".join(str(port) for port in free_ports(arguments.job).values()))
    return Exit.DONE


def main() -> None:
    """Run on the first node, before srun."""
    parser = Parser(prog="python -m widemix.launch.slurm.ports", description=__doc__)
    parser.add_argument("job", type=int, help="the job's number")
    sys.exit(run_command(parser, _print))


if __name__ == "__main__":
    main()
