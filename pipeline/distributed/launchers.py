"""Translates the environment variables of mpirun and srun to torchrun's: RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

torchrun, DeepSpeed's launcher, Kubeflow's trainer and `widemix train --ranks` set these themselves. OpenMPI's mpirun
and Slurm's srun, when they start the ranks directly, set variables of their own.
"""

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

from pipeline.errors import InputError

PORTS = range(20_000, 32_000)  # below the ephemeral ports of Linux
USES = ("train", "preflight", "rendezvous")  # a node may start one while others still end another


def export_torchrun_env(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Add torchrun's variables to the environment; return whether a launcher started this process."""
    environ.update(torchrun_env(environ))
    return "RANK" in environ


def torchrun_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the environment: none if torchrun's are set, or if there is no launcher.

    `InputError` for mpirun on several nodes without MASTER_ADDR.
    """
    if "RANK" in environ:
        return {}
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _from_openmpi(environ)
    if "SLURM_STEP_ID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _from_srun(environ)
    return {}


def _from_openmpi(environ: Mapping[str, str]) -> dict[str, str]:
    names = {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    }
    variables = {name: environ[openmpi] for name, openmpi in names.items()}
    if variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"]:
        variables["MASTER_ADDR"] = environ.get("MASTER_ADDR", "127.0.0.1")
    elif "MASTER_ADDR" not in environ:
        raise InputError("MASTER_ADDR is not set: on several nodes mpirun needs `-x MASTER_ADDR=$(hostname)`")
    # Every rank has the same job id and must derive the same port from it.
    job = int(re.sub(r"\D", "", environ.get("PMIX_NAMESPACE", "")) or "0")
    return variables | {"MASTER_PORT": environ.get("MASTER_PORT", str(job_port(job)))}


def _from_srun(environ: Mapping[str, str]) -> dict[str, str]:
    node = int(environ["SLURM_NODEID"])
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])[node]),
        "MASTER_ADDR": environ.get("MASTER_ADDR", first_host(environ["SLURM_STEP_NODELIST"])),
        "MASTER_PORT": environ.get("MASTER_PORT", str(job_port(int(environ["SLURM_JOB_ID"])))),
    }


def job_port(job: int, use: str = "train") -> int:
    """Return the port for one use of a job, `use` one of USES.

    No two uses of one job share a port, nor do 4,000 consecutive jobs, which may run on one node.
    """
    return PORTS[(len(USES) * job + USES.index(use)) % len(PORTS)]


def tasks_per_node(text: str) -> list[int]:
    """Parse Slurm's tasks per node: `4(x3),2` is `[4, 4, 4, 2]`."""
    counts = []
    for part in text.split(","):
        tasks, _, times = part.rstrip(")").partition("(x")
        counts += [int(tasks)] * int(times or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: `gpu007-ib` of `gpu[007-012,20]-ib,login1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None  # it matches the empty string too
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def route_from(host: str) -> str | None:
    """Return the address, IPv4 or IPv6, that this machine would use to reach `host`; None if there is no route."""
    try:
        addresses = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, _, _, address in addresses:
        with socket.socket(family, kind) as probe, suppress(OSError):
            probe.connect(address)  # UDP: no packet is sent
            return probe.getsockname()[0].partition("%")[0]
    return None
