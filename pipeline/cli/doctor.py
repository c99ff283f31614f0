"""widemix doctor: checks of this machine, and of the nodes of a cluster."""

import argparse
from pathlib import Path

from widemix.distributed.launchers import export_torchrun_env
from widemix.errors import InputError


def add_doctor(commands) -> None:
    """Add `widemix doctor`."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine, or the nodes of a cluster, before training",
        examples="widemix doctor\nsrun widemix doctor --cluster --data datasets/imagenet --exclude faulty.txt",
        description="Check what is installed on this machine: a table of what is present, missing or mismatched, and "
        "how to fix it. Exit code 1: training cannot run here. With --cluster, started on all ranks by the job's "
        "launcher: compare the versions, clocks, GPUs, limits, disks and network of all nodes with each other. Exit "
        "code 1: a node is faulty and should be excluded from the job.",
    )
    add = parser.add_argument
    add("--cluster", action="store_true", help="check all nodes of a job; takes under a minute")
    add("--data", type=Path, metavar="DIR", help="with --cluster: time reading this prepared folder on each node")
    network = "with --cluster: rated bandwidth of a node, such as 2xedr or Gbit/s, as of `widemix cost`"
    add("--network", metavar="RATE", help=network)
    exclude = "with --cluster: write the names of faulty nodes to this file, one a line"
    add("--exclude", type=Path, metavar="FILE", help=exclude)
    timeout = (
        "with --cluster: time limit of a rank's measurements, and again of those of the network, s (default: 20)"
    )
    add("--timeout", type=float, default=20.0, metavar="S", help=timeout)
    parser.set_defaults(command=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    if not arguments.cluster:
        for name in ("data", "network", "exclude"):
            if getattr(arguments, name) is not None:
                raise InputError(f"--{name} needs --cluster")
        from widemix.doctor import run_doctor

        return run_doctor()
    export_torchrun_env()
    if not 0 < arguments.timeout < 3600:
        raise InputError(f"--timeout {arguments.timeout:g}: must be above 0 and under 3600")
    from widemix.doctor.cluster import run_cluster_doctor
    from widemix.estimate.hardware import network_bandwidth

    rated = network_bandwidth(arguments.network) if arguments.network is not None else None
    return run_cluster_doctor(arguments.data, rated, arguments.exclude, arguments.timeout)
