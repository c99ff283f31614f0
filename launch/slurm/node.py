"""What srun starts once a node: stage the data, find the addresses, and run torchrun."""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from launch.slurm.finish import SICK
from launch.stage import stage
from pipeline.cli.commands import Exit, Parser, run_command
from pipeline.distributed.launchers import job_port, route_from
from pipeline.distributed.rank_status import VARIABLE, node_name
from pipeline.errors import InputError
from pipeline.recipe import load_recipe

if TYPE_CHECKING:  # importing torch takes seconds, in which a node can stage
    from torch.distributed import Store

GRACE = 270  # seconds that ranks have to save in; train.sbatch asks for 300


def torchrun_command(
    arguments: argparse.Namespace, program: Sequence[str], environ: Mapping[str, str], use: str = "train"
) -> list[str]:
    """torchrun's arguments on this node, to run `program` on all ranks; another `use` has another port.

    Addresses are numbers, and which node hosts the rendezvous is said: host names that several nodes share, that
    nobody can resolve or that resolve to 127.0.1.1 do no harm.
    """
    node, job = int(environ["SLURM_NODEID"]), int(environ["SLURM_JOB_ID"])
    head = _number(arguments.head)
    own = route_from(arguments.head if node else arguments.second)
    if own is None:
        raise InputError(f"node {node}: no network leads to {arguments.head if node else arguments.second}")
    host = f"[{head}]" if ":" in head else head
    port = job_port(job, use)
    return [
        *("--nnodes", environ["SLURM_STEP_NUM_NODES"], "--nproc-per-node", str(arguments.ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}"),
        *("--rdzv-id", f"{use}-{job}-{environ.get('SLURM_RESTART_COUNT', '0')}"),
        *("--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", own),
        *("--max-restarts", str(arguments.restarts if use == "train" else 0)),
        *("--signals-to-handle", "SIGUSR1,SIGTERM,SIGINT,SIGHUP,SIGQUIT", "--shutdown-timeout", str(GRACE)),
        *("--log-dir", str(arguments.logs / f"node-{node}"), "--tee", "3", "--local-ranks-filter", "0"),
        *("-m", *program),
    ]


def meet(arguments: argparse.Namespace, environ: Mapping[str, str]) -> "Store":
    """Wait for all nodes: one may stage for longer than the minute that torchrun waits. If one fails, srun ends all.

    What is returned is to be kept: on the first node it is what the others ask.
    """
    from torch.distributed import TCPStore

    node, nodes = int(environ["SLURM_NODEID"]), int(environ["SLURM_STEP_NUM_NODES"])
    port = job_port(int(environ["SLURM_JOB_ID"]), "meeting")
    store = TCPStore(_number(arguments.head), port, nodes, is_master=node == 0, timeout=timedelta(days=1))
    if node == 0:  # the others are through with connecting as soon as this one is there
        store.set("all", "here")
    store.wait(["all"])
    return store


def _number(host: str) -> str:
    """The address of a host; several tries, because name servers of a starting node fail at times."""
    for wait in (1, 3, 9, 0):
        try:
            return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            trouble = error
            time.sleep(wait)
    raise InputError(f"{host}: this node cannot resolve the first node's address ({trouble.strerror})")


def _start(arguments: argparse.Namespace, train: list[str]) -> Exit:
    """Run this node's part of the job. Why it could not begin is left in the logs too, for the job's verdict."""
    try:
        return _run(arguments, train)
    except InputError as error:
        (arguments.logs / f"node-{os.environ['SLURM_NODEID']}.error").write_text(f"{node_name()}: {error}\n")
        raise


def _run(arguments: argparse.Namespace, train: list[str]) -> Exit:
    overrides = [_override(word) for word in train[1:] if word.startswith("--") and "=" in word]
    data = Path(load_recipe(train[0], overrides).data.path)
    if arguments.stage:
        local = Path(os.path.expandvars(arguments.stage))
        if not local.is_absolute():
            raise InputError(f"--stage-to {arguments.stage}: is {local} on this node; is the variable set there?")
        data = stage(data, local)
    _store = meet(arguments, os.environ)
    if arguments.preflight != "no" and _must_go_without(_preflight(arguments, data), os.environ):
        return Exit.FAILED
    command = torchrun_command(arguments, ["pipeline.train", *train, f"--data.path={data}"], os.environ)
    (arguments.logs / f"node-{os.environ['SLURM_NODEID']}.json").write_text(json.dumps(command) + "\n")
    # Otherwise the ranks of a second attempt read the addresses of the first from the launcher's store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.run import main as torchrun

    with suppress(SignalException):  # the ranks were told and have ended; their words say how
        torchrun(command)
    return Exit.DONE


def _preflight(arguments: argparse.Namespace, data: Path) -> list[str]:
    """The sick nodes that are to be left out, which the file `sick` of the logs names; why is in the job's log."""
    program = ["pipeline.cli", "doctor", "--cluster", "--data", str(data)]
    named = arguments.logs / SICK
    if arguments.preflight == "exclude":
        program += ["--exclude", str(named)]
    words = torchrun_command(arguments, program, os.environ, use="preflight")
    environ = {name: value for name, value in os.environ.items() if name != VARIABLE}  # no last words of these ranks
    subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], env=environ, check=False)
    return named.read_text().split() if named.exists() else []


def _must_go_without(sick: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the partition has nodes enough without the sick: if not, Slurm would hold the job for ever."""
    if not sick:
        return False
    try:
        enough = _others(sick, environ) >= int(environ["SLURM_STEP_NUM_NODES"])
    except (OSError, subprocess.CalledProcessError):  # a container, in which there is no Slurm to ask
        return True
    if not enough and environ["SLURM_NODEID"] == "0":
        print(f"{', '.join(sick)}: sick, and kept, for the partition has too few nodes without", flush=True)
    return enough


def _others(sick: Sequence[str], environ: Mapping[str, str]) -> int:
    """Usable nodes of the partition, neither sick nor excluded; what --constraint asks for is not looked at."""
    job = " ".join(_ask("scontrol", "show", "job", "--oneliner", environ["SLURM_JOB_ID"]))
    found = re.search(r" ExcNodeList=(\S+)", job)
    excluded = _ask("scontrol", "show", "hostnames", found[1]) if found and found[1] != "(null)" else []
    usable = ("--states=idle,mixed,allocated,completing", f"--partition={environ['SLURM_JOB_PARTITION']}")
    there = _ask("sinfo", "--noheader", "--Node", "--format=%N", *usable)
    return len(set(there) - {*excluded, *sick})


def _ask(*command: str) -> list[str]:
    """The words of what a command of Slurm's prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def _override(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name.removeprefix("--"), value


def main() -> None:
    parser = Parser(prog="python -m launch.slurm.node", description=__doc__)
    for name in ("head", "second", "stage", "preflight"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("ranks", "restarts"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    here = sys.argv.index("--")
    train = sys.argv[here + 1 :]
    sys.exit(run_command(parser, lambda arguments: _start(arguments, train), sys.argv[1:here]))


if __name__ == "__main__":
    main()
