"""`widemix doctor --cluster`, on every rank of a job before it trains: which nodes are sick, slow, or not there.

Ranks speak through the job's store until all have answered, and only then by collectives, so that one that is hung or
gone is named instead of waited for. Rank 0 judges; all end with its exit code.
"""

import datetime
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline.distributed.rank_status import node_name
from pipeline.distributed.topology import Topology, name_interface, read_topology
from pipeline.doctor.judge import Complaint, judge
from pipeline.doctor.links import measure_links
from pipeline.doctor.survey import disk_name, read_rate, survey
from pipeline.errors import InputError

EXPECTED = 0.5  # of the network's rated bandwidth, for an all-reduce not to be remarked on


def run_cluster_doctor(data: Path | None, rated: float | None, exclude: Path | None, patience: float) -> int:
    """0 where all nodes are well, 1 where one must be left out.

    `data`: a prepared folder on each node's disk; `rated`: bytes/s that a node's network should move; `exclude`: file
    for the sick nodes' names; `patience`: seconds that a rank has to answer, and again for the network.
    """
    here = read_topology()
    torch.set_num_threads(1)  # where CPUs are short a second thread would keep the first waiting
    store = _store(here, patience)
    store.set(f"host/{here.rank}", node_name())
    facts = survey(here)
    if data and here.local_rank == 0 and _reads(store, here, data):
        facts["disk"] = read_rate(data)
    store.set(f"survey/{here.rank}", json.dumps(facts))
    silent = _await(store, "survey", here.world, patience)
    if not silent:
        _connect(here, store, facts, patience)
        silent = _await(store, "links", here.world, patience)
    named: list[str] = []
    if here.is_main:
        surveys = [json.loads(store.get(f"survey/{rank}")) for rank in range(here.world) if rank not in silent]
        if not silent:
            surveys = [json.loads(store.get(f"links/{rank}")) for rank in range(here.world)]
        complaints = [*(_silence(store, here, rank) for rank in silent), *(judge(surveys) if surveys else [])]
        sick = any(complaint.state == "sick" for complaint in complaints)
        # What has no name can't be left out by name.
        named = list(dict.fromkeys(c.host for c in complaints if c.state == "sick" and " " not in c.host))
        _report(surveys, complaints, rated)
        if named:
            print(f"Leave out: sbatch --exclude={','.join(named)}", flush=True)
        elif not sick:
            print("All nodes are well.", flush=True)
        store.set("verdict", str(int(sick)))
    code = int(store.get("verdict"))  # waits for it
    _farewell(here, store, here.world - len(silent))
    if here.is_main and exclude:  # last: the others need not wait for a disk
        try:
            exclude.write_text("".join(f"{host}\n" for host in named))
        except OSError as error:
            raise InputError(f"--exclude {exclude}: cannot be written ({error.strerror})") from None
    return code


def _store(here: Topology, patience: float) -> dist.Store:
    """The launcher's own store under torchrun, else one that rank 0 holds. Nobody is waited for."""
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))
    if here.world == 1:
        return dist.HashStore()
    holds = here.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = datetime.timedelta(seconds=3 * patience)
    try:
        store = dist.TCPStore(address, port, None, holds, limit, wait_for_workers=False)
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(f"rank 0 does not answer at MASTER_ADDR {address}, MASTER_PORT {port}: {reason}") from None
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"doctor/{restart}", store)


def _reads(store: dist.Store, here: Topology, data: Path) -> bool:
    """Whether this rank is the one to read its disk; where the folder is missing, each says so itself."""
    if not data.is_dir():
        return True
    first = store.compare_set(f"disk/{disk_name(data)}", "", str(here.rank))
    return first.decode() == str(here.rank)


def _await(store: dist.Store, what: str, world: int, patience: float) -> list[int]:
    """The ranks that have not said `what` in time."""
    deadline = time.monotonic() + patience
    silent = list(range(world))
    while silent and time.monotonic() < deadline:
        silent = [rank for rank in silent if not store.check([f"{what}/{rank}"])]
        if silent:
            time.sleep(0.1)
    return silent


def _connect(here: Topology, store: dist.Store, facts: dict[str, Any], patience: float) -> None:
    """Join the group and measure; what fails or hangs is told by the silence of its ranks."""
    backend = "cpu:gloo,cuda:nccl" if here.device.type == "cuda" else "gloo"
    if here.device.type == "cuda":
        torch.cuda.set_device(here.device)
    if here.world > here.local_world:
        name_interface(os.environ)
    try:
        limit = datetime.timedelta(seconds=patience)
        dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.world, timeout=limit)
        store.set(f"links/{here.rank}", json.dumps(facts | measure_links(here)))
    except RuntimeError as error:
        store.set(f"failed/{here.rank}", str(error).splitlines()[0])


def _silence(store: dist.Store, here: Topology, rank: int) -> Complaint:
    if not store.check([f"host/{rank}"]):
        return Complaint(_name_of(rank // here.local_world), "start", f"rank {rank} never came")
    host = store.get(f"host/{rank}").decode()
    if not store.check([f"survey/{rank}"]):
        return Complaint(host, "answer", f"rank {rank} hangs: its GPU, or the disk of --data")
    why = store.get(f"failed/{rank}").decode() if store.check([f"failed/{rank}"]) else "hangs"
    return Complaint(host, "network", f"rank {rank}: {why}")


def _name_of(node: int) -> str:
    """The name of a node that has not told it: Slurm's, where it is Slurm."""
    listed, program = os.environ.get("SLURM_JOB_NODELIST", ""), shutil.which("scontrol")
    if listed and program:
        asked = subprocess.run([program, "show", "hostnames", listed], capture_output=True, text=True, check=False)
        names = asked.stdout.split()
        if node < len(names):
            return names[node]
    return f"node {node} of the launcher's list"


def _report(surveys: Sequence[dict[str, Any]], complaints: Sequence[Complaint], rated: float | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    hosts = dict.fromkeys(survey["host"] for survey in surveys)
    console.print(f"ranks that answered: {len(surveys)}, on nodes: {len(hosts)}")
    links = [survey for survey in surveys if "bus" in survey]
    if len(links) > 1:
        slowest, bus = max(s["latency"] for s in links), min(s["bus"] for s in links)
        expected = f", {bus / rated:.0%} of the {8 * rated / 1e9:g} Gbit/s expected" if rated else ""
        console.print(
            f"all-reduce: {1e6 * slowest:,.0f} us of one number, {8 * bus / 1e9:,.2f} Gbit/s of many{expected}"
        )
        if rated and bus < EXPECTED * rated:
            console.print("slow: if no node is named below, is it the right interface? NCCL_DEBUG=INFO tells")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("state", "node", "what", "found"):
        table.add_column(name, no_wrap=name != "found", overflow="fold")
    for complaint in complaints:
        colour = "bold red" if complaint.state == "sick" else "yellow"
        table.add_row(f"[{colour}]{complaint.state}[/]", *map(escape, complaint[:3]))
    if complaints:
        console.print(table)


def _farewell(here: Topology, store: dist.Store, expected: int) -> None:
    """Rank 0 holds the store: it leaves last, but waits no longer than a moment."""
    store.add("left", 1)
    deadline = time.monotonic() + 5
    while here.is_main and store.add("left", 0) < expected and time.monotonic() < deadline:
        time.sleep(0.05)
    if dist.is_initialized():
        dist.destroy_process_group()
