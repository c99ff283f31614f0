"""Other launchers' variables in torchrun's words: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_*.

torchrun, DeepSpeed's launcher, Kubeflow's trainer and `widemix train --ranks` set those themselves. OpenMPI's mpirun
and Slurm's srun, where they start the ranks without any of these, have words of their own.
"""

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

from pipeline.errors import InputError

PORTS = range(20_000, 32_000)  # below those that Linux hands out by itself
USES = ("train", "preflight", "meeting")  # a node may begin the one while others end the other


def adopt(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Add what `translate` finds, for this process and PyTorch; whether any launcher started this process."""
    environ.update(translate(environ))
    return "RANK" in environ


def translate(environ: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment; nothing where torchrun's words are there or no launcher is."""
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
    words = {ours: environ[theirs] for ours, theirs in names.items()}
    if words["WORLD_SIZE"] == words["LOCAL_WORLD_SIZE"]:
        words["MASTER_ADDR"] = environ.get("MASTER_ADDR", "127.0.0.1")
    elif "MASTER_ADDR" not in environ:
        raise InputError("MASTER_ADDR is not set: on several nodes mpirun needs `-x MASTER_ADDR=$(hostname)`")
    # Every rank has the same job id and must come to the same port.
    job = int(re.sub(r"\D", "", environ.get("PMIX_NAMESPACE", "")) or "0")
    return words | {"MASTER_PORT": environ.get("MASTER_PORT", str(job_port(job)))}


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
    """The port of one use of a job; others have others, as have 4,000 jobs in a row, which may share a node."""
    return PORTS[(len(USES) * job + USES.index(use)) % len(PORTS)]


def tasks_per_node(text: str) -> list[int]:
    """Slurm's `4(x3),2` is `[4, 4, 4, 2]`."""
    counts = []
    for part in text.split(","):
        tasks, _, times = part.rstrip(")").partition("(x")
        counts += [int(tasks)] * int(times or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first of Slurm's `gpu[007-012,20]-ib,login1`: `gpu007-ib`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None  # it matches the empty string too
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def route_from(host: str) -> str | None:
    """This machine's own address, IPv4 or IPv6, on the way to `host`; None where there is no way."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe, suppress(OSError):
            probe.connect(address)  # of UDP: nothing is sent
            return probe.getsockname()[0].partition("%")[0]
    return None
