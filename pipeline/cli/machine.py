"""widemix cost, doctor."""

import argparse
import json
from pathlib import Path

from pipeline.commands import Exit, add_recipe_arguments, load_from_arguments


def add_cost(commands) -> None:
    from pipeline.estimate import GPUS

    parser = commands.add_parser(
        "cost",
        help="what a recipe takes",
        description="Parameters, connections, width, FLOPs, memory and hours of a recipe, computed without training.",
    )
    add_recipe_arguments(parser)
    parser.add_argument("--named", action="store_true", help="in place of a recipe: a table of all named networks")
    parser.add_argument(
        "--recipes", type=Path, metavar="DIR", help="in place of a recipe: write the tables of DIR/README.md anew"
    )
    parser.add_argument("--omega", type=float, help="in place of a recipe: Mixers (C, S) of this mean connectivity")
    parser.add_argument("--gamma", type=float, default=1.0, help="their expansion (default: 1)")
    parser.add_argument("--gpus", type=int, default=1, help="how many GPUs (default: 1)")
    parser.add_argument("--gpu", choices=tuple(GPUS), default="a100", help="which GPU (default: a100)")
    parser.add_argument(
        "--samples",
        type=int,
        help="training pictures (default: the prepared folder's, or ImageNet-1k's at 1000 classes)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.set_defaults(command=_cost)


def _cost(arguments: argparse.Namespace) -> Exit:
    from pipeline.estimate import estimate, named_table, pairs_table, show

    if arguments.omega is not None:
        print(pairs_table(arguments.omega, arguments.gamma))
        return Exit.DONE
    if arguments.named:
        print(named_table())
        return Exit.DONE
    if arguments.recipes is not None:
        from pipeline.catalogue import refresh

        print(f"{refresh(arguments.recipes)}: written")
        return Exit.DONE
    recipe = load_from_arguments(arguments)
    rows = estimate(recipe, arguments.gpus, arguments.gpu, arguments.samples)
    show(rows, arguments.recipe)
    if arguments.json:
        machine = f"{arguments.gpus} x {arguments.gpu}"
        arguments.json.write_text(json.dumps({"machine": machine, "rows": [row._asdict() for row in rows]}, indent=1))
    return Exit.DONE


def add_doctor(commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this machine has and lacks",
        description="A table of what is there, missing or mismatched, each with its cure. Exit code 1: cannot train.",
    )
    parser.set_defaults(command=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from pipeline.doctor import run_doctor

    return run_doctor()
