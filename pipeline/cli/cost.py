"""widemix cost: memory, time and cost of a recipe, computed."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widemix.cli.arguments import add_recipe_arguments
from widemix.cli.commands import check_most, load_from_arguments
from widemix.errors import Exit, InputError
from widemix.files import write_output
from widemix.terminal import print

if TYPE_CHECKING:
    from widemix.estimate.hardware import Cluster


def add_cost(commands) -> None:
    """Add `widemix cost`."""
    parser = commands.add_parser(
        "cost",
        help="estimate memory, time and cost of a recipe",
        examples="widemix cost digits/rp_mixer --samples 1437\n"
        "widemix cost imagenet/rp_mixer_b_w --gpus 128 --gpu h100 --rehearse",
        description="Print parameters, connections, width and FLOPs of a recipe, and its memory, traffic, time and "
        "storage on a cluster. All of it is computed, without training.",
    )
    add_recipe_arguments(parser)
    _add_cluster_options(parser)
    add = parser.add_argument
    samples = "training samples (default: those of the prepared folder, or of ImageNet by data.num_classes)"
    add("--samples", type=int, metavar="N", help=samples)
    rehearse = (
        "also take a step as rank 0 of a fake process group: counts memory and traffic, and fails where the "
        "cluster would"
    )
    add("--rehearse", action="store_true", help=rehearse)
    add("--measure", action="store_true", help="also time a pass on this machine, and compare it with its roofline")
    add("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    add = parser.add_section("tables", "tables of many networks or recipes, instead of one recipe").add_argument
    add("--named", action="store_true", help="print the cost of all networks that have a name")
    omega = "print Mixers of this mean connectivity: pairs of channels C and tokens S"
    add("--omega", type=float, metavar="X", help=omega)
    add("--gamma", type=float, default=1.0, metavar="X", help="with --omega: their expansion (default: 1)")
    add("--table", type=Path, metavar="DIR", help="rehearse all recipes of this folder, and print a Markdown table")
    add("--recipes", type=Path, metavar="DIR", help="regenerate the tables of recipes in DIR/README.md")
    parser.set_defaults(command=_cost)


def _add_cluster_options(parser: argparse.ArgumentParser) -> None:
    from widemix.estimate.hardware import GPUS, NETWORKS

    add = parser.add_argument_group("cluster").add_argument
    add("--gpus", type=int, default=1, metavar="N", help="number of GPUs in all (default: 1)")
    add("--gpu", choices=tuple(GPUS), default="a100", help="kind of GPU (default: a100)")
    add("--nodes", type=int, metavar="N", help="number of nodes (default: one for every four GPUs)")
    network = (
        f"network of a node: adapters, such as hdr or 2xedr ({', '.join(NETWORKS)}), or a number of Gbit/s "
        "(default: hdr)"
    )
    add("--network", default="hdr", metavar="RATE", help=network)


def _cost(arguments: argparse.Namespace) -> Exit:
    from widemix.estimate.hardware import Cluster

    tables = [f"--{name}" for name in ("named", "omega", "table", "recipes") if getattr(arguments, name)]
    named = [arguments.recipe] if arguments.recipe else [f"--{name}" for name, _ in arguments.overrides[:1]]
    if tables and len(tables + named) > 1:
        raise InputError(f"{tables[0]}: is instead of a recipe, and does not go with {[*tables, *named][1]}")
    if arguments.recipes:
        from widemix.estimate.recipe_tables import refresh

        print(f"{refresh(arguments.recipes)}: written")
        return Exit.DONE
    cluster = Cluster(arguments.gpus, arguments.gpu, arguments.nodes, arguments.network)
    rows = _table(arguments)(arguments, cluster)
    if arguments.json:
        written = {"machine": f"{cluster.gpus} x {cluster.gpu}", "rows": rows}
        write_output(arguments.json, json.dumps(written, indent=1) + "\n")
    return Exit.DONE


def _table(arguments: argparse.Namespace) -> Callable[[argparse.Namespace, "Cluster"], list[Any]]:
    """Return the function that prints the chosen table, and returns its rows."""
    if arguments.omega is not None:
        return _print_pairs
    if arguments.named:
        return _print_named
    return _print_rehearsals if arguments.table else _print_recipe


def _print_pairs(arguments: argparse.Namespace, _cluster: "Cluster") -> list[Any]:
    from widemix.estimate.tables import pairs_rows, pairs_table

    rows = pairs_rows(arguments.omega, arguments.gamma)
    print(pairs_table(arguments.omega, arguments.gamma))
    return rows


def _print_named(_arguments: argparse.Namespace, _cluster: "Cluster") -> list[Any]:
    from widemix.estimate.tables import named_rows, named_table

    print(named_table())
    return named_rows()


def _print_rehearsals(arguments: argparse.Namespace, cluster: "Cluster") -> list[Any]:
    from widemix.estimate.rehearse import HEAD, rehearsal_line, rehearsal_rows

    rows: list[Any] = []
    for row in rehearsal_rows(arguments.table, cluster, arguments.overrides):
        print(rehearsal_line(row) if rows else f"{HEAD}\n{rehearsal_line(row)}", flush=True)
        rows.append(row)
    return rows


def _print_recipe(arguments: argparse.Namespace, cluster: "Cluster") -> list[Any]:
    recipe = load_from_arguments(arguments)
    check_most(arguments, 1e12, "samples")
    cluster.check()

    from widemix.estimate.report import estimate  # imports torch and timm, for which no mistake should wait
    from widemix.estimate.tables import show

    rows = estimate(recipe, cluster, arguments.samples, arguments.rehearse, arguments.measure)
    show(rows, arguments.recipe)
    return [row._asdict() for row in rows]
