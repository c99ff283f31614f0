"""widemix cost, doctor."""

import argparse
import json
from pathlib import Path
from typing import Any

from pipeline.cli.commands import Exit, add_recipe_arguments, load_from_arguments
from pipeline.distributed.launchers import adopt
from pipeline.errors import InputError


def add_cost(commands) -> None:
    from pipeline.estimate.hardware import GPUS, NETWORKS

    parser = commands.add_parser(
        "cost",
        help="what a recipe takes",
        description="Parameters, connections, width and FLOPs of a recipe; memory, traffic, time and storage on a "
        "cluster; computed without training.",
    )
    add_recipe_arguments(parser)
    add = parser.add_argument
    add("--named", action="store_true", help="in place of a recipe: a table of all named networks")
    add("--omega", type=float, help="in place of a recipe: Mixers (C, S) of this mean connectivity")
    add("--gamma", type=float, default=1.0, help="their expansion (default: 1)")
    add(
        "--table",
        type=Path,
        metavar="DIR",
        help="in place of a recipe: rehearse all of a folder, as a Markdown table",
    )
    add("--recipes", type=Path, metavar="DIR", help="in place of a recipe: write the tables of DIR/README.md anew")
    add("--gpus", type=int, default=1, help="how many GPUs (default: 1)")
    add("--gpu", choices=tuple(GPUS), default="a100", help="which GPU (default: a100)")
    add("--nodes", type=int, help="nodes that they are on (default: four GPUs a node)")
    network = f"of a node: adapters, such as 2xedr ({', '.join(NETWORKS)}), or Gbit/s (default: hdr)"
    add("--network", default="hdr", help=network)
    samples = "training pictures (default: the prepared folder's, or ImageNet-1k's at 1000 classes)"
    add("--samples", type=int, help=samples)
    rehearse = "take a step on so many fake ranks in this process: what cannot work there fails here"
    add("--rehearse", action="store_true", help=rehearse)
    add("--measure", action="store_true", help="time a pass on this machine and hold the roofline against it")
    add("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.set_defaults(command=_cost)


def _cost(arguments: argparse.Namespace) -> Exit:
    from pipeline.estimate.hardware import Cluster
    from pipeline.estimate.rehearsals import HEAD, rehearsal_line, rehearsal_rows
    from pipeline.estimate.report import estimate, show
    from pipeline.estimate.tables import named_rows, named_table, pairs_rows, pairs_table

    if arguments.recipes:
        from pipeline.estimate.recipe_tables import refresh

        print(f"{refresh(arguments.recipes)}: written")
        return Exit.DONE
    cluster = Cluster(arguments.gpus, arguments.gpu, arguments.nodes, arguments.network)
    rows: list[Any]
    if arguments.omega is not None:
        rows = pairs_rows(arguments.omega, arguments.gamma)
        print(pairs_table(arguments.omega, arguments.gamma))
    elif arguments.named:
        rows = named_rows()
        print(named_table())
    elif arguments.table:
        rows = []
        for row in rehearsal_rows(arguments.table, cluster):
            print(rehearsal_line(row) if rows else f"{HEAD}\n{rehearsal_line(row)}", flush=True)
            rows.append(row)
    else:
        recipe = load_from_arguments(arguments)
        found = estimate(recipe, cluster, arguments.samples, arguments.rehearse, arguments.measure)
        show(found, arguments.recipe)
        rows = [row._asdict() for row in found]
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": f"{cluster.gpus} x {cluster.gpu}", "rows": rows}, indent=1) + "\n"
        )
    return Exit.DONE


def add_doctor(commands) -> None:
    """Add `widemix doctor`."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine, or the nodes of a cluster, before training",
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
    adopt()
    if not arguments.cluster:
        for name in ("data", "network", "exclude"):
            if getattr(arguments, name) is not None:
                raise InputError(f"--{name} needs --cluster")
        from pipeline.doctor import run_doctor

        return run_doctor()
    if not 0 < arguments.timeout < 3600:
        raise InputError(f"--timeout {arguments.timeout:g}: must be above 0 and under 3600")
    from pipeline.doctor.cluster import run_cluster_doctor
    from pipeline.estimate.hardware import network_bandwidth

    rated = network_bandwidth(arguments.network) if arguments.network is not None else None
    return run_cluster_doctor(arguments.data, rated, arguments.exclude, arguments.timeout)
