"""widemix train: on this machine's GPUs, or as one of the ranks of a launcher."""

import argparse
import dataclasses
import os
import shlex
import sys
import time
from pathlib import Path

from widemix.cli.arguments import Parser, add_recipe_arguments
from widemix.cli.commands import check_least, load_from_arguments
from widemix.distributed.kernel_caches import use_node_caches
from widemix.distributed.launchers import export_torchrun_env, unused_tasks
from widemix.distributed.rank_status import has_rank_status, remove_earlier_statuses, write_rank_status
from widemix.distributed.startup_timing import note_process
from widemix.errors import Exit, InputError, command
from widemix.recipe import Recipe, check_init_from, check_world, dump_recipe, match_folder
from widemix.terminal import print

_SHOWN = ("parameters", "training FLOPs", "memory", "step", "steps", "hours", "GPU hours")  # rows of `widemix cost`
EXAMPLES = """widemix train digits/rp_mixer --run-dir runs/a      the same command resumes
widemix train digits/rp_mixer --train.epochs 5 --optim.lr 1e-3
widemix train digits/rp_mixer --ranks 2 --engine.kind deepspeed"""


def add_train(commands) -> None:
    """Add `widemix train`."""
    parser = commands.add_parser(
        "train", help="train a recipe", description="Train a recipe, or continue a run.", examples=EXAMPLES
    )
    _add_arguments(parser)
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="number of processes to start on this machine, one for each GPU if it has GPUs (default: the number of "
        "GPUs, or 1). On several nodes start `-m widemix train` with torchrun instead",
    )
    dry = "print the resolved recipe, its cost and its first batch, and write nothing"
    parser.add_argument("--dry-run", action="store_true", help=dry)
    parser.set_defaults(command=_train)


def _train(arguments: argparse.Namespace) -> int:
    if export_torchrun_env(ranks=arguments.ranks):
        if arguments.dry_run:
            raise InputError("--dry-run: is for `widemix train` alone, without a launcher")
        _begin_rank()
        return _train_rank(match_folder(load_from_arguments(arguments, needs_folder=True)), arguments)
    recipe = load_from_arguments(arguments, needs_folder=True)
    check_least(arguments, 1, "ranks")
    check_world(recipe, arguments.ranks or 1)
    recipe = match_folder(recipe)  # last, since it needs prepared data
    if not (arguments.run_dir and arguments.run_dir.exists()):  # a run that goes on has its weights
        check_init_from(recipe)
    ranks = arguments.ranks or _count_gpus()  # imports torch, which takes seconds
    check_world(recipe, ranks)
    if arguments.dry_run:
        return _dry_run(recipe, arguments.recipe, ranks)
    if warning := unused_tasks(os.environ, ranks):
        print(warning, file=sys.stderr)
    if ranks == 1:
        _begin_rank()
        return _train_rank(recipe, arguments)
    from widemix.launch.local import launch

    os.environ["WIDEMIX_COMMAND"] = shlex.join(["widemix", *sys.argv[1:]])  # for environment.json
    command = ["-m", "widemix", "train", arguments.recipe, f"--resume={arguments.resume}"]
    if arguments.run_dir:
        command.append(f"--run-dir={arguments.run_dir}")
    command += [] if not arguments.verbosity else ["-q" if arguments.verbosity < 0 else "-v"]
    return launch([*command, *(f"--{name}={value}" for name, value in arguments.overrides)], ranks)


def _dry_run(recipe: Recipe, title: str, ranks: int) -> Exit:
    """Print what a run would do: every key, the first batch, and the time here and on as many A100s."""
    from widemix.data.loader import TrainLoader
    from widemix.distributed.topology import read_topology
    from widemix.estimate.hardware import Cluster
    from widemix.estimate.measure import describe_timing, time_run
    from widemix.estimate.report import estimate
    from widemix.estimate.tables import show

    print(dump_recipe(recipe))
    topology = dataclasses.replace(read_topology(), world=ranks, local_world=ranks)
    began = time.perf_counter()
    loader = TrainLoader(recipe.data, recipe.augment, recipe.train, topology)
    with loader.batches(epoch=0) as batches:
        batch = next(batches)
    seconds = time.perf_counter() - began
    shape = " x ".join(map(str, batch.inputs.shape))
    print(
        f"first batch of rank 0, in {seconds:.1f} s: {shape}, {batch.inputs.dtype}, values "
        f"{batch.inputs.min().item():.3g} to {batch.inputs.max().item():.3g}; {loader.steps} steps an epoch"
    )
    print(describe_timing(recipe, time_run(recipe, loader, topology), topology.device))
    rows = estimate(recipe, Cluster(ranks))
    show([row for row in rows if row.name in _SHOWN], f"{title}: an estimate for {ranks} x A100")
    print(f"{command('cost', title, '--gpu', 'h100')} has all rows, and other GPUs\nnothing was written")
    return Exit.DONE


def _count_gpus() -> int:
    """The number of GPUs, but at least 1."""
    import torch

    return max(1, torch.cuda.device_count())


def _add_arguments(parser: Parser) -> None:
    """Add the arguments that each rank gets too."""
    add_recipe_arguments(parser)
    parser.add_argument("--run-dir", type=Path, help="run folder (default: runs/<recipe>-<time>)")
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="auto: resume from the run folder's newest complete checkpoint; never: fail if the folder holds a run; "
        "PATH: start a new run folder from that checkpoint or run (default: auto)",
    )
    loud = parser.add_mutually_exclusive_group()
    quiet = "print only warnings and the last line"
    loud.add_argument("-q", "--quiet", dest="verbosity", action="store_const", const=-1, default=0, help=quiet)
    verbose = "print every line of metrics.jsonl"
    loud.add_argument("-v", "--verbose", dest="verbosity", action="store_const", const=1, help=verbose)


def _begin_rank() -> None:
    """Note that this process is a rank, with the variables of the launcher that started it."""
    use_node_caches()
    note_process(restarted=has_rank_status())
    remove_earlier_statuses()
    write_rank_status(None)


def _train_rank(recipe: Recipe, arguments: argparse.Namespace) -> Exit:
    """Train as one rank."""
    from widemix.progress_line import announce_import

    with announce_import():
        from widemix.distributed.requests import stops_once
        from widemix.trainer import train

    with stops_once():
        return train(
            recipe,
            arguments.run_dir,
            arguments.resume,
            Path(arguments.recipe),
            arguments.overrides,
            arguments.verbosity,
        )
