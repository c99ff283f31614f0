"""The program that srun starts once on each node: it stages the data, finds addresses and runs torchrun."""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from widemix.cli.arguments import Parser
from widemix.cli.commands import run_command
from widemix.distributed.launchers import USES, route_from
from widemix.distributed.rank_status import STATUS_DIR_VARIABLE, node_name
from widemix.distributed.startup_timing import note_part
from widemix.errors import Exit, InputError
from widemix.launch.environment import unpack
from widemix.launch.relay import Neighbour, Relay
from widemix.launch.slurm.elastic import Meeting, train_elastic
from widemix.launch.slurm.finish import FAULTY_NODES, STARTED
from widemix.launch.torchrun import check_torch, data_for, local_folder, run_torchrun, stop_options, train_program
from widemix.processes import end_with_parent
from widemix.terminal import print

LOCAL_VARIABLE = "WIDEMIX_ENVIRONMENT"  # the environment that a node has changed to
JOIN_S = 120  # for the nodes of an attempt to start torchrun
TELL_AFTER_S = 60.0  # until the first node says for which it waits; then again after twice as long
_POLL_S = 0.2

if TYPE_CHECKING:  # importing torch takes seconds; staging comes first
    from torch.distributed import Store


def torchrun_command(
    arguments: argparse.Namespace,
    program: Sequence[str],
    environ: Mapping[str, str],
    use: str = "train",
    attempt: tuple[int, int] | None = None,
) -> list[str]:
    """Return torchrun's arguments on this node, to run the module `program` on all ranks.

    use: "train" or "preflight"; each has a port of its own, of `arguments.ports`.
    attempt: number and nodes of an attempt of an elastic job. Its nodes meet in the store that is open on the first
        node all the while, and torchrun does not start ranks again, since the next attempt does.

    Addresses are numeric and the node that hosts the rendezvous is given, so that host names need not be unique or
    resolvable, and may resolve to 127.0.1.1.
    """
    node, job = int(environ["SLURM_NODEID"]), int(environ["SLURM_JOB_ID"])
    head, *others = arguments.addresses
    other = head if node or not others else others[0]
    own = route_from(other)
    if own is None:
        raise InputError(f"node {node}: no route to {other}")
    nodes, restarts, port = environ["SLURM_STEP_NUM_NODES"], arguments.restarts, arguments.ports[use]
    meeting, place = f"{use}-{job}-{environ.get('SLURM_RESTART_COUNT', '0')}", f"is_host={int(node == 0)}"
    if attempt:
        nodes, restarts, port = str(attempt[1]), 0, arguments.ports["rendezvous"]
        meeting, place = f"{meeting}-{attempt[0]}", f"is_host=0,join_timeout={JOIN_S}"
    elif use == "preflight":
        restarts = 0
    return [
        *("--nnodes", nodes, "--nproc-per-node", str(arguments.ranks), "--max-restarts", str(restarts)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{_bracketed(_numeric_address(head))}:{port}"),
        *("--rdzv-id", meeting, "--rdzv-conf", place, "--local-addr", own),
        *stop_options(),
        *("--log-dir", str(arguments.logs / f"node-{node}"), "--tee", "3", "--local-ranks-filter", "0"),
        *("-m", *program),
    ]


def wait_for_all_nodes(arguments: argparse.Namespace, environ: Mapping[str, str]) -> "Store":
    """Wait for all nodes, since staging on one may take longer than the minute that torchrun waits.

    Keep the returned store alive: on the first node it is the server of the others. If a node fails, srun ends all.
    The first node prints for which it waits, ever more rarely.
    """
    store, tell_after = _open_store(arguments, environ), TELL_AFTER_S
    store.set(f"here {environ['SLURM_NODEID']}", "")
    missing = list(range(int(environ["SLURM_STEP_NUM_NODES"]))) if environ["SLURM_NODEID"] == "0" else []
    began = time.monotonic()
    while missing := [node for node in missing if not store.check([f"here {node}"])]:
        if time.monotonic() - began > tell_after:
            tell_after *= 2
            names = ", ".join(arguments.addresses[node] for node in missing)
            print(f"all nodes wait for {names}, which has not started or still stages", flush=True)
        time.sleep(_POLL_S)
    if environ["SLURM_NODEID"] == "0":
        store.set("all", "here")
    store.wait(["all"])
    return store


def _open_store(arguments: argparse.Namespace, environ: Mapping[str, str]) -> "Store":
    """The first node's store, when it is open."""
    from torch.distributed import TCPStore

    return TCPStore(
        _numeric_address(arguments.addresses[0]),
        arguments.ports["rendezvous"],
        is_master=environ["SLURM_NODEID"] == "0",
        timeout=timedelta(days=1),
        wait_for_workers=False,
    )


def _numeric_address(host: str) -> str:
    """Resolve a host, with retries, because name resolution of a node that has just started may fail."""
    for wait in (1, 3, 9, 0):
        try:
            return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            failure = error
            time.sleep(wait)
    raise InputError(f"{host}: this node cannot resolve the first node's address ({failure.strerror})")


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _start(arguments: argparse.Namespace, train: list[str]) -> Exit:
    """Run this node's part of the job; writes an `InputError` to the logs, where finish.py reads it."""
    logs, node = arguments.logs, os.environ["SLURM_NODEID"]
    if not logs.is_dir():
        raise InputError(f"{node_name()}: {logs}: does not exist on this node: all nodes must share --run-dir")
    (logs / STARTED.format(node)).touch()
    try:
        return _run(arguments, train)
    except InputError as error:
        (logs / f"node-{node}.error").write_text(f"{node_name()}: {error}\n")
        raise


def _run(arguments: argparse.Namespace, train: list[str]) -> Exit:
    if LOCAL_VARIABLE not in os.environ:
        note_part("batch script")
        if arguments.environment:
            _use_local_python(arguments.environment, arguments.stage)
    check_torch()
    if arguments.sizes:
        return _run_elastic(arguments, train)
    with make_relay(arguments, os.environ) as relay:
        data = data_for(train, arguments.stage, relay)
        note_part("staging")
        _store = wait_for_all_nodes(arguments, os.environ)
    note_part("waiting for nodes")
    if arguments.preflight != "no":
        if can_exclude(_preflight(arguments, data), os.environ):
            return Exit.FAILED
        note_part("preflight")
    command = torchrun_command(arguments, train_program(train, data), os.environ)
    (arguments.logs / f"node-{os.environ['SLURM_NODEID']}.json").write_text(json.dumps(command) + "\n")
    run_torchrun(command)
    return Exit.DONE


def _use_local_python(archive: str, stage_to: str) -> None:
    """Replace this process by itself in the environment that an archive holds, on this node's own disk."""
    python = str(unpack(Path(archive), local_folder(stage_to)) / "bin/python")
    note_part("environment")
    os.environ[LOCAL_VARIABLE] = Path(archive).stem
    os.execv(python, [python, "-m", "widemix.launch.slurm.node", *sys.argv[1:]])


def _run_elastic(arguments: argparse.Namespace, train: list[str]) -> Exit:
    """The same for a job that goes on without nodes that fail."""
    # Before staging, since a client could not tell a server that has failed from one that is late.
    store, node = _open_store(arguments, os.environ), int(os.environ["SLURM_NODEID"])

    def attempt(number: int, size: int) -> None:
        if number == 0:
            note_part("waiting for nodes")
        command = torchrun_command(arguments, program, os.environ, attempt=(number, size))
        (arguments.logs / f"node-{node}.json").write_text(json.dumps(command) + "\n")
        run_torchrun(command)

    with make_relay(arguments, os.environ) as relay:  # for nodes that are late, too
        program = train_program(train, data_for(train, arguments.stage, relay))
        note_part("staging")
        nodes = int(os.environ["SLURM_STEP_NUM_NODES"])
        train_elastic(Meeting(store, node, nodes, arguments.sizes), node, attempt, arguments.restarts)
    return Exit.DONE


def make_relay(arguments: argparse.Namespace, environ: Mapping[str, str]) -> AbstractContextManager[Relay | None]:
    """Return the relay of staged blocks from the node before this one to the next; nothing on a single node."""
    node, token = int(environ["SLURM_NODEID"]), environ.get("WIDEMIX_STAGE_TOKEN")
    if not arguments.stage or not token or len(arguments.addresses) == 1:
        return nullcontext()
    port = arguments.ports["train"]  # which torchrun does not need yet
    if not node:
        return Relay(None, port, token)
    before = _numeric_address(arguments.addresses[node - 1])
    # Nodes of one machine share its ports: a node would wait for itself.
    return nullcontext() if route_from(before) == before else Relay(Neighbour(before, port, token), port, token)


def _preflight(arguments: argparse.Namespace, data: Path) -> list[str]:
    """Run the doctor on all ranks; with --preflight exclude, return the faulty nodes that it names."""
    program = ["widemix", "doctor", "--cluster", "--data", str(data)]
    names = arguments.logs / FAULTY_NODES
    if arguments.preflight == "exclude":
        program += ["--exclude", str(names)]
    command = torchrun_command(arguments, program, os.environ, use="preflight")
    # The doctor's ranks write no status.
    environ = {name: value for name, value in os.environ.items() if name != STATUS_DIR_VARIABLE}
    command = [sys.executable, "-m", "torch.distributed.run", *command]
    subprocess.run(command, env=environ, check=False, preexec_fn=end_with_parent())
    return names.read_text().split() if names.exists() else []


def can_exclude(faulty: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether there are faulty nodes, and the partition has enough others: if not, the job would wait for ever."""
    if not faulty:
        return False
    try:
        enough = _count_others(faulty, environ) >= int(environ["SLURM_STEP_NUM_NODES"])
    except (OSError, subprocess.CalledProcessError):  # in a container, without Slurm's commands
        return True
    if not enough and environ["SLURM_NODEID"] == "0":
        print(f"{', '.join(faulty)}: faulty, but kept: the partition has too few other nodes", flush=True)
    return enough


def _count_others(faulty: Sequence[str], environ: Mapping[str, str]) -> int:
    """Count the usable nodes of the partition that are neither faulty nor excluded, ignoring --constraint."""
    job = environ["SLURM_JOB_ID"]  # one run of an array has the array's own number, which stands for all of them
    if "SLURM_ARRAY_JOB_ID" in environ:
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    match = re.search(r" ExcNodeList=(\S+)", " ".join(_words("scontrol", "show", "job", "--oneliner", job)))
    excluded = _words("scontrol", "show", "hostnames", match[1]) if match and match[1] != "(null)" else []
    usable = ("--states=idle,mixed,allocated,completing", f"--partition={environ['SLURM_JOB_PARTITION']}")
    nodes = _words("sinfo", "--noheader", "--Node", "--format=%N", *usable)
    return len(set(nodes) - {*excluded, *faulty})


def _words(*command: str) -> list[str]:
    """Run a command of Slurm and split its output at white space."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def _ports(text: str) -> dict[str, int]:
    return dict(zip(USES, map(int, text.split(",")), strict=True))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main() -> None:
    """Run as a task of srun; the words after `--` are the arguments of `widemix.trainer`."""
    parser = Parser(prog="python -m widemix.launch.slurm.node", description=__doc__)
    for name in ("stage", "preflight", "environment"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("ranks", "restarts"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--ports", type=_ports, required=True, metavar=",".join(USES))
    addresses = "of the nodes, in the order of SLURM_NODEID"
    parser.add_argument(
        "--addresses", type=lambda text: text.split(","), required=True, metavar="A,A", help=addresses
    )
    parser.add_argument("--sizes", type=_numbers, required=True, metavar="N,N", help="see train.sbatch")
    parser.add_argument("--logs", type=Path, required=True)
    separator = sys.argv.index("--")
    train = sys.argv[separator + 1 :]
    sys.exit(run_command(parser, lambda arguments: _start(arguments, train), sys.argv[1:separator]))


if __name__ == "__main__":
    main()
