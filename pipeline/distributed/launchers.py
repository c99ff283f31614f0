"""Translates the variables of MPI's launchers, srun, jsrun and flux to torchrun's: RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

torchrun, DeepSpeed's launcher, Kubeflow's trainer and `widemix train --ranks` set these themselves. What starts the
ranks directly sets variables of its own; without them each process would believe that it is alone.
"""

import os
import re
import socket
import zlib
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from widemix.errors import LauncherError


@dataclass(frozen=True)
class Launcher:
    """The variables in which a launcher tells each process its place; of several names the first that is set."""

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]  # for srun and flux what it is computed from
    job: tuple[str, ...]  # what all ranks of a job share, and no other job has
    pass_on: str  # how it passes MASTER_ADDR on to the ranks


_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
SRUN, FLUX = "srun", "flux run"


def _of_prefix(name: str, prefix: str, job: tuple[str, ...], pass_on: str) -> Launcher:
    local_rank, local_size = (f"{prefix}_LOCAL_RANK",), (f"{prefix}_LOCAL_SIZE",)
    return Launcher(name, f"{prefix}_RANK", f"{prefix}_SIZE", local_rank, local_size, job, pass_on)


_RSH = "mpirun_rsh needs `MASTER_ADDR=HOST`, with the host of rank 0, before the program"
_JSRUN = "jsrun needs `-E MASTER_ADDR=HOST`, with the host of rank 0"
# Those that others may have started come first: mpirun within a job of Slurm.
LAUNCHERS = (
    _of_prefix("mpirun", "OMPI_COMM_WORLD", ("PMIX_NAMESPACE", *_JOBS), "mpirun needs `-x MASTER_ADDR=$(hostname)`"),
    _of_prefix("mpirun_rsh", "MV2_COMM_WORLD", _JOBS, _RSH),
    _of_prefix("mpirun_rsh", "MVP_COMM_WORLD", _JOBS, _RSH),
    _of_prefix("jsrun", "JSM_NAMESPACE", ("PMIX_NAMESPACE", *_JOBS), _JSRUN),
    Launcher(  # MPICH's Hydra, Intel MPI, Cray PALS, ParaStation
        "mpiexec",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
        ("I_MPI_HYDRA_UUID", "PALS_APID", *_JOBS),
        "mpiexec needs `-genv MASTER_ADDR HOST` (PALS: `--env MASTER_ADDR=HOST`), with the host of rank 0",
    ),
    _of_prefix("horovodrun", "HOROVOD", _JOBS, "horovodrun passes on what its shell exports"),
    Launcher(
        FLUX,
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        ("FLUX_TASK_LOCAL_ID",),
        ("FLUX_JOB_NNODES",),
        ("FLUX_JOB_ID",),
        "flux run needs `--env=MASTER_ADDR=HOST`, with the host of rank 0",
    ),
    Launcher(
        SRUN,
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE",),
        ("SLURM_JOB_ID",),
        "srun passes on what the job's script exports",
    ),
)

PORTS = range(20_000, 32_000)  # below the ephemeral ports of Linux
USES = ("train", "preflight", "rendezvous")  # a node may start one while others still end another
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_TASKS = "SLURM_NTASKS"  # of a job, also in its script, which is one process
_OWN_RUN_ID = re.compile(r"none|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # torchrun's, on a single node


# Set by launchers that do not say how many processes they start; or by the others, whose size has been lost.
_RANK_ALONE = {name: launcher.name for launcher in LAUNCHERS for name in (launcher.rank, *launcher.local_rank)}
_RANK_ALONE |= {"PMIX_RANK": "prterun", "PALS_RANKID": "PALS", "ALPS_APP_PE": "aprun"}


def export_torchrun_env(environ: MutableMapping[str, str] = os.environ, ranks: int | None = None) -> bool:
    """Add torchrun's variables to the environment; return whether a launcher started this process.

    ranks: how many processes the user asked for, by --ranks.
    `LauncherError` where a variable says that there are more processes than this one is to train with, or that
    contradicts another, or --ranks.
    """
    environ.update(torchrun_env(environ))
    _check_sizes(environ)
    world, started = read_place(environ).world, bool(environ.get("RANK"))
    if started and ranks not in (None, world):
        raise LauncherError(
            f"--ranks {ranks}: a launcher has started this process as one of {world}, which work together; let it "
            "start as many as you want, without --ranks"
        )
    return started


def torchrun_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the environment: none if torchrun's are set, or if there is no launcher.

    `LauncherError` for what a launcher leaves out, such as MASTER_ADDR on several nodes.
    """
    if environ.get("RANK"):
        return {}
    found = list(_found(environ))
    # Slurm's batch script, which is no rank, has SLURM_PROCID=0.
    alone = [name for name in _RANK_ALONE if environ.get(name) and (environ[name], _RANK_ALONE[name]) != ("0", SRUN)]
    if alone and not found:
        name = alone[0]
        raise LauncherError(
            f"{name}={environ[name]}: {_RANK_ALONE[name]} started this process, and no variable says how many there "
            f"are; set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, or unset {name} to train in this one alone"
        )
    world = number(environ, found[0].size) if found else 1
    if world == 1:
        return {}
    # srun and flux set PMI_RANK and PMI_SIZE too, but not the place on the node.
    of_world = [launcher for launcher in found if number(environ, launcher.size) == world]
    complete = (one for one in of_world if _first(environ, one.local_rank) and _first(environ, one.local_size))
    launcher = next(complete, found[0])
    local_rank, local_size = _place_on_node(environ, launcher, world)
    variables = {
        "RANK": str(number(environ, launcher.rank)),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
    }
    address = environ.get("MASTER_ADDR") or _first_address(environ, launcher, several=local_size != world)
    port = environ.get("MASTER_PORT") or str(job_port(_job_number(environ, launcher)))
    return variables | {"MASTER_ADDR": address, "MASTER_PORT": port}


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what a launcher says, for a process that is to train in a world of its own."""
    names = {*_TORCHRUN, "MASTER_ADDR", "MASTER_PORT", _TASKS, *_RANK_ALONE}
    for launcher in LAUNCHERS:
        names |= {launcher.rank, launcher.size, *launcher.local_rank, *launcher.local_size}
    return {name: value for name, value in environ.items() if name not in names}


def unused_tasks(environ: Mapping[str, str], ranks: int) -> str | None:
    """Return a warning where Slurm's job has more tasks than the ranks that its script starts; None elsewhere.

    It is no error: `sbatch -n 4` often means four cores.
    """
    tasks = 1 if environ.get("SLURM_STEP_ID") else number(environ, _TASKS, 1)
    if tasks <= ranks:
        return None
    return (
        f"warning: {_TASKS}={tasks}: the job has {tasks} tasks, and this command trains in {ranks}; start it by srun "
        f"to train in all, or unset {_TASKS} where they are meant as CPU cores"
    )


def how_to_train_alone(environ: Mapping[str, str]) -> str:
    """Say how one process trains alone, instead of waiting for the others that the variables promise."""
    sizes = (launcher.size for launcher in _found(environ) if environ[launcher.size] == environ.get("WORLD_SIZE"))
    return f"to train in one process alone, unset {next(sizes, 'RANK and WORLD_SIZE')}"


def _found(environ: Mapping[str, str]) -> Iterator[Launcher]:
    """The launchers that say rank and size; Slurm's batch script, which is no step, has one process."""
    for launcher in LAUNCHERS:
        step = launcher.name != SRUN or environ.get("SLURM_STEP_ID")
        if step and environ.get(launcher.rank) and environ.get(launcher.size):
            yield launcher


def _place_on_node(environ: Mapping[str, str], launcher: Launcher, world: int) -> tuple[int, int]:
    """Return the local rank, and the number of ranks on this node."""
    rank = _first(environ, (*launcher.local_rank, "LOCAL_RANK"))
    size = _first(environ, (*launcher.local_size, "LOCAL_WORLD_SIZE"))
    if rank is None or size is None:
        missing = launcher.local_rank if rank is None else launcher.local_size
        raise LauncherError(
            f"{launcher.name} sets {launcher.size}, but not {' or '.join(missing)}; set LOCAL_RANK and "
            "LOCAL_WORLD_SIZE, a process's number on its node and how many there are"
        )
    if size == "SLURM_STEP_TASKS_PER_NODE":
        try:
            return number(environ, rank), tasks_per_node(environ[size])[number(environ, "SLURM_NODEID")]
        except (ValueError, IndexError):
            raise LauncherError(f"{size}={environ[size]!r} does not fit SLURM_NODEID") from None
    if size == "FLUX_JOB_NNODES":
        return number(environ, rank), -(-world // max(1, number(environ, size)))
    return number(environ, rank), number(environ, size)


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if environ.get(name)), None)


def _first_address(environ: Mapping[str, str], launcher: Launcher, several: bool) -> str:
    """Return the host of rank 0: with Slurm the first of the list, which is sorted, or of the user's own."""
    if not several:
        return "127.0.0.1"
    if launcher.name == SRUN and environ.get("SLURM_DISTRIBUTION") == "arbitrary":
        return _first_of_hostfile(environ)
    lists = ("SLURM_STEP_NODELIST",) * (launcher.name == SRUN) + ("SLURM_JOB_NODELIST",)
    if name := _first(environ, lists):
        return first_host(environ[name])
    raise LauncherError(f"MASTER_ADDR is not set: on several nodes {launcher.pass_on}")


def _first_of_hostfile(environ: Mapping[str, str]) -> str:
    """Return the host of the first task where the user lists that of each, which Slurm does not tell the tasks."""
    with suppress(KeyError, OSError, UnicodeError):
        lines = Path(environ["SLURM_HOSTFILE"]).read_text().splitlines()
        if hosts := [host for line in lines if (host := re.split(r"[#*]", line)[0].strip())]:
            return first_host(hosts[0])
    raise LauncherError(
        "SLURM_DISTRIBUTION=arbitrary: rank 0 is on the first node of srun's list, which no variable names; set "
        "SLURM_HOSTFILE to a file with that list, which all nodes can read, or MASTER_ADDR to that node"
    )


def _job_number(environ: Mapping[str, str], launcher: Launcher) -> int:
    """Return a number that all ranks of this job derive, and other jobs hardly; 0 where nothing tells jobs apart."""
    name = _first(environ, launcher.job)
    text = environ[name] if name else "0"
    return int(text) if text.isdecimal() else zlib.crc32(text.encode())


def _check_sizes(environ: Mapping[str, str]) -> None:
    """`LauncherError` where a variable says that there are more processes than this one is to train with."""
    rank, run_id = environ.get("RANK"), environ.get("TORCHELASTIC_RUN_ID")
    size, world = number(environ, "WORLD_SIZE", 1), number(environ, "WORLD_SIZE", 1) if rank else 1
    if run_id and not _OWN_RUN_ID.fullmatch(run_id):
        return  # torchrun on several nodes, of which some may have been lost
    if size > world:
        raise LauncherError(
            f"WORLD_SIZE={size} is set, but RANK is not; start the ranks by torchrun or --ranks {size}, or unset "
            "WORLD_SIZE to train in this process alone"
        )
    if rank and not environ.get("WORLD_SIZE"):
        raise LauncherError(
            f"RANK={rank} is set, but WORLD_SIZE is not; set it too, or unset RANK to train in this process alone"
        )
    for launcher in LAUNCHERS:
        names = [launcher.size] if launcher.name in (SRUN, FLUX) else [launcher.size, *launcher.local_size]
        if launcher.name == SRUN and not environ.get("SLURM_STEP_ID"):
            continue
        for name in names:
            if (size := number(environ, name, world)) > world:
                join = f"set {launcher.rank} too"
                if environ.get(launcher.rank):
                    join = f"start them by {launcher.name} alone" + ", without RANK" * bool(rank)
                if run_id:
                    join = "start one torchrun a node, with --nnodes and --rdzv-endpoint"
                raise LauncherError(
                    f"{name}={size}: {launcher.name} started {size} processes, and each would train in a world of "
                    f"{world}; to train together {join}; to train apart unset {name}"
                )


class Place(NamedTuple):
    """`rank` of `world` processes, `local_rank` of `local_world` on its node."""

    rank: int
    world: int
    local_rank: int
    local_world: int


def read_place(environ: Mapping[str, str]) -> Place:
    """Return the place of this process, by torchrun's variables.

    `LauncherError` if they contradict each other.
    """
    rank, world, local_rank = (number(environ, *name) for name in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    local_world = number(environ, "LOCAL_WORLD_SIZE", number(environ, "LOCAL_SIZE", 1))
    if not (0 <= rank < world and 0 <= local_rank < max(local_world, 1) <= world):
        raise LauncherError(
            f"the launcher's variables do not fit: RANK {rank} of WORLD_SIZE {world}, LOCAL_RANK {local_rank} of "
            f"LOCAL_WORLD_SIZE {local_world}; unset those that are left over, or start the ranks by torchrun"
        )
    return Place(rank, world, local_rank, local_world)


def number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable's whole number, `default` where it is not set or empty; `LauncherError` if it is none."""
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise LauncherError(f"{name}={text!r} in the environment is not a whole number") from None


def master_address(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT, where rank 0 is; `LauncherError` if one is missing or no port."""
    host = environ.get("MASTER_ADDR", "").strip()
    for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", environ.get("MASTER_PORT", ""))):
        if not value:
            raise LauncherError(
                f"WORLD_SIZE={environ.get('WORLD_SIZE')} but {name} is not set; set MASTER_ADDR to rank 0's host "
                "and MASTER_PORT to a free port there, or start the ranks by torchrun"
            )
    port = number(environ, "MASTER_PORT")
    if not 0 < port < 2**16:
        raise LauncherError(f"MASTER_PORT={port}: a port is 1 to 65535")
    return host, port


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
