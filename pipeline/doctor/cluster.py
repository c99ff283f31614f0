"""`widemix doctor --cluster`: which nodes of a job are faulty, slow or missing, checked on all ranks before training.

Until all ranks have answered they communicate only through the job's store, and by collectives after that, so that a
rank that hangs or is missing is named instead of waited for. Rank 0 compares the nodes; all end with its exit code.
"""

import datetime
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.markup import escape
from rich.table import Table

from widemix.distributed.rank_status import node_name
from widemix.distributed.rendezvous import Rendezvous
from widemix.distributed.topology import Topology, read_topology, set_gloo_interface
from widemix.doctor.compare import Problem, Survey, compare_nodes
from widemix.doctor.survey import disk_name, measure_links, read_rate, survey
from widemix.errors import InputError
from widemix.progress_line import Console
from widemix.terminal import print

EXPECTED = 0.5  # fraction of the network's rated bandwidth; an all-reduce below it gets a remark


def run_cluster_doctor(data: Path | None, rated: float | None, exclude: Path | None, timeout_s: float) -> int:
    """Check all nodes and print a table; returns 0 if all nodes are healthy, 1 if one must be excluded.

    data: prepared folder whose reading is timed on each node's disk.
    rated: bytes/s that a node's network should reach.
    exclude: file to write the names of faulty nodes to, one a line.
    timeout_s: time limit for a rank's measurements, and again for those of the network.
    """
    topology = read_topology()
    torch.set_num_threads(1)  # a second thread would delay the first where CPUs are few
    store = _connect_store(topology, timeout_s)
    store.set(f"host/{topology.rank}", node_name())
    facts = survey(topology)
    if data and topology.local_rank == 0 and _reads_disk(store, topology, data):
        facts["disk"] = read_rate(data)
    store.set(f"survey/{topology.rank}", json.dumps(facts))
    silent = _silent_ranks(store, "survey", topology.world, timeout_s)
    if not silent:
        measure_network(topology, store, facts, timeout_s)
        silent = _silent_ranks(store, "links", topology.world, timeout_s)
    faulty = _judge(store, topology, silent, rated) if topology.is_main else []
    exit_code = int(store.get("exit_code"))  # waits until rank 0 has set it
    _disconnect(topology, store, topology.world - len(silent))
    if topology.is_main and exclude:  # last: the others need not wait for a disk
        try:
            exclude.write_text("".join(f"{host}\n" for host in faulty))
        except OSError as error:
            raise InputError(f"--exclude {exclude}: cannot be written ({error.strerror})") from None
    return exit_code


def _judge(store: dist.Store, topology: Topology, silent: Sequence[int], rated: float | None) -> list[str]:
    """On rank 0: print all problems, set the exit code and return the names of the faulty nodes."""
    if silent:
        answers = [f"survey/{rank}" for rank in range(topology.world) if rank not in silent]
    else:
        answers = [f"links/{rank}" for rank in range(topology.world)]
    surveys = [json.loads(store.get(answer)) for answer in answers]
    problems = [_silence(store, topology, rank) for rank in silent]
    problems += compare_nodes(surveys) if surveys else []
    faulty = [problem.host for problem in problems if problem.state == "faulty"]
    names = [host for host in dict.fromkeys(faulty) if " " not in host]  # without a name it can't be excluded
    print_report(surveys, problems, rated)
    if names:
        print(f"To exclude the faulty nodes: sbatch --exclude={','.join(names)}", flush=True)
    elif not faulty:
        print("All nodes are healthy.", flush=True)
    store.set("exit_code", str(int(bool(faulty))))
    return names


def _connect_store(topology: Topology, timeout_s: float) -> dist.Store:
    """Return torchrun's own store, or one that rank 0 hosts; does not wait for other ranks."""
    if topology.world == 1:
        return dist.HashStore()
    rendezvous = Rendezvous(topology.rank, topology.world, 3 * timeout_s)
    store = rendezvous.run(rendezvous.connect)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"doctor/{restart}", store)


def _reads_disk(store: dist.Store, topology: Topology, data: Path) -> bool:
    """Whether this rank times its disk: the first that asks for each disk, and every node that has no such folder."""
    if not data.is_dir():
        return True
    first = store.compare_set(f"disk/{disk_name(data)}", "", str(topology.rank))
    return first.decode() == str(topology.rank)


def _silent_ranks(store: dist.Store, key: str, world: int, timeout_s: float) -> list[int]:
    """Wait until all ranks have set `key`; returns those that have not when the time is over."""
    deadline = time.monotonic() + timeout_s
    silent = list(range(world))
    while silent and time.monotonic() < deadline:
        silent = [rank for rank in silent if not store.check([f"{key}/{rank}"])]
        if silent:
            time.sleep(0.1)
    return silent


def measure_network(topology: Topology, store: dist.Store, facts: Survey, timeout_s: float) -> None:
    """Join the process group and measure links; ranks on which that fails or hangs stay silent."""
    backend = "cpu:gloo,cuda:nccl" if topology.device.type == "cuda" else "gloo"
    if topology.device.type == "cuda":
        torch.cuda.set_device(topology.device)
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # what fails or hangs raises an error, and kills no rank
    if topology.world > topology.local_world:
        set_gloo_interface(os.environ)
    try:
        limit = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=topology.rank, world_size=topology.world, timeout=limit)
        store.set(f"links/{topology.rank}", json.dumps(facts | measure_links(topology)))
    except RuntimeError as error:
        store.set(f"failed/{topology.rank}", str(error).splitlines()[0])


def _silence(store: dist.Store, topology: Topology, rank: int) -> Problem:
    """Say how far a silent rank came."""
    if not store.check([f"host/{rank}"]):
        return Problem(_name_of(rank // topology.local_world), "start", f"rank {rank} has not started")
    host = store.get(f"host/{rank}").decode()
    if not store.check([f"survey/{rank}"]):
        return Problem(host, "answer", f"rank {rank} hangs: its GPU, or the disk of --data")
    reason = store.get(f"failed/{rank}").decode() if store.check([f"failed/{rank}"]) else "hangs"
    return Problem(host, "network", f"rank {rank}: {reason}")


def _name_of(node: int) -> str:
    """Return the name of a node that has not connected: Slurm's under Slurm, else a description with spaces."""
    nodes, program = os.environ.get("SLURM_JOB_NODELIST", ""), shutil.which("scontrol")
    if nodes and program:
        result = subprocess.run([program, "show", "hostnames", nodes], capture_output=True, text=True, check=False)
        names = result.stdout.split()
        if node < len(names):
            return names[node]
    return f"node {node} of the launcher's list"


def print_report(surveys: Sequence[Survey], problems: Sequence[Problem], rated: float | None) -> None:
    """Print the speed of the network, and a table of all problems."""
    console = Console(highlight=False, soft_wrap=True)
    hosts = {survey["host"] for survey in surveys}
    console.print(f"ranks that answered: {len(surveys)}, on nodes: {len(hosts)}")
    links = [survey for survey in surveys if "bus" in survey]
    if len(links) > 1:
        latency, bus = max(s["latency"] for s in links), min(s["bus"] for s in links)
        fraction = f", {bus / rated:.0%} of the {8 * rated / 1e9:g} Gbit/s of --network" if rated else ""
        console.print(
            f"all-reduce: latency {1e6 * latency:,.0f} us, bus bandwidth {8 * bus / 1e9:,.2f} Gbit/s{fraction}"
        )
        if rated and bus < EXPECTED * rated:
            console.print(
                "The network is slow. If no node is named below, the interface may be wrong: see NCCL_DEBUG=INFO"
            )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("state", "node", "what", "found"):
        table.add_column(name, no_wrap=name != "found", overflow="fold")
    for problem in problems:
        colour = "bold red" if problem.state == "faulty" else "yellow"
        table.add_row(f"[{colour}]{problem.state}[/]", *map(escape, problem[:3]))
    if problems:
        console.print(table)


def _disconnect(topology: Topology, store: dist.Store, expected: int) -> None:
    """Leave the store. Rank 0, which hosts it, first waits for the `expected` ranks, but at most 5 s."""
    store.add("left", 1)
    deadline = time.monotonic() + 5
    while topology.is_main and store.add("left", 0) < expected and time.monotonic() < deadline:
        time.sleep(0.05)
    if dist.is_initialized():
        dist.destroy_process_group()
