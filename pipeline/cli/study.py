"""widemix study plan, run, search, report; and bounds, which a paper computes without training."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.commands import Exit, check_least
from pipeline.errors import InputError
from pipeline.recipe import keys, suggest
from pipeline.recipe.files import find_study

if TYPE_CHECKING:
    from pipeline.studies.cell import Cell
    from pipeline.studies.runner import Runner
    from pipeline.studies.study import Study


def add_study(commands) -> None:
    """Add `widemix study plan`, `run`, `search`, `report` and `bounds`."""
    parser = commands.add_parser(
        "study",
        help="train recipes that differ in a few keys, and compare them",
        description="List, train and draw the runs of a study file, such as recipes/studies/figure7.yaml. "
        "Its runs are called cells. `widemix submit STUDY.yaml` trains them as a Slurm job array.",
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name, command, example, text in (
        ("plan", _plan, " --gpu a100", "print each cell, its state and, with --gpu, its hours and disk space"),
        (
            "run",
            _run,
            " --only 'rp-*' --at-once 2",
            "train the cells that are neither done nor being trained by another process; the same command continues, "
            "and may run on several machines at once if they share the folder",
        ),
        (
            "search",
            _search,
            " --key optim.lr --low 1e-4 --high 1e-2",
            "search the value of a key, such as the learning rate, with the best top-1 (mean over the seeds) at each "
            "point of the study, by Optuna; the same command continues",
        ),
        ("report", _report, "", "write a CSV table, the figure (PNG, SVG) and a Markdown page about the results"),
    ):
        verb = verbs.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            examples=f"widemix study {name} figure7{example}",
        )
        verb.add_argument(
            "recipe", type=find_study, metavar="STUDY.yaml", help="study file, or a shipped study's name: figure7"
        )
        verb.add_argument(
            "--to", type=Path, metavar="DIR", help="folder of the cells' run folders (default: runs/<study>)"
        )
        verb.add_argument(
            "--only", default="*", metavar="PATTERN", help="only cells whose name matches, such as 'cifar10-*'"
        )
        verb.epilog = "Recipe keys as --section.key VALUE apply to all cells; give the same ones to all commands."
        verb.set_defaults(command=command)
        _add_options(name, verb)
    _add_bounds(verbs)


def _add_bounds(verbs) -> None:
    text = "compute the separation-rank bounds of Mixers and transformers by depth"
    source = "(Navon & Bronstein 2023, theorems 5.5 to 5.7, conclusion 5.9)"
    verb = verbs.add_parser("bounds", help=text, description=f"{text[0].upper()}{text[1:]} {source}.")
    verb.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder for bounds.csv, .png and .svg")
    verb.add_argument("--width", type=int, default=3**30, metavar="M", help="width of a token (default: 3^30)")
    verb.add_argument("--tokens", type=int, default=196, metavar="N", help="tokens (default: 196)")
    verb.add_argument("--heads", type=int, default=12, metavar="H", help="attention heads (default: 12)")
    verb.add_argument("--depth", type=int, default=24, metavar="P", help="greatest number of layers (default: 24)")
    verb.set_defaults(command=_bounds)


def _add_options(name: str, verb: argparse.ArgumentParser) -> None:
    if name == "plan":
        from pipeline.estimate.hardware import GPUS

        gpu = "also print hours on one GPU of this kind, by a roofline, and the size of the checkpoints"
        verb.add_argument("--gpu", choices=tuple(GPUS), help=gpu)
    if name == "search":
        verb.add_argument("--key", default="optim.lr", metavar="KEY", help="recipe key to search (default: optim.lr)")
        verb.add_argument("--low", type=float, required=True, metavar="X", help="least value")
        verb.add_argument("--high", type=float, required=True, metavar="X", help="greatest value")
        verb.add_argument("--linear", action="store_true", help="not on a logarithmic axis")
        verb.add_argument("--trials", type=int, default=10, metavar="N", help="values at each point (default: 10)")
        seed = "seed of the sampler, Optuna's tree-structured Parzen estimator (default: 0)"
        verb.add_argument("--sampler-seed", type=int, default=0, metavar="N", help=seed)
    if name in ("run", "search"):
        at_once = "cells to train at the same time; they share this machine's CPUs and GPUs (default: 1)"
        verb.add_argument("--at-once", type=int, default=1, metavar="N", help=at_once)
        verb.add_argument("--ranks", type=int, default=1, metavar="N", help="processes of each cell (default: 1)")
    if name == "run":
        known = (
            "folder of an earlier report, such as recipes/studies/results: train only cells without a result in it"
        )
        verb.add_argument("--report", type=Path, metavar="DIR", help=known)
    if name == "report":
        where = (
            "folder for the report (default: that of the run folders); a report that is there keeps the results of "
            "cells that were trained elsewhere"
        )
        verb.add_argument("--report", type=Path, metavar="DIR", help=where)


def _read(arguments: argparse.Namespace) -> tuple["Study", "list[Cell]", Path]:
    """The study, its cells, and the folder of their runs."""
    from pipeline.studies.study import read_study, study_cells

    study = read_study(arguments.recipe)
    cells = study_cells(arguments.recipe, study, arguments.overrides, arguments.only)
    return study, cells, arguments.to or Path("runs") / arguments.recipe.stem


def _trained(arguments: argparse.Namespace) -> tuple["Study", "list[Cell]", Path]:
    """The study, the cells to train, each once, and the folder of their runs."""
    from pipeline.studies.cell import unique

    study, cells, folder = _read(arguments)
    if not study.measured:
        raise InputError(f"{arguments.recipe}: shows sizes of networks alone; `widemix study report` draws it")
    return study, unique(cells), folder


def _earlier(arguments: argparse.Namespace) -> Path | None:
    """The table of the report that --report names."""
    return arguments.report / f"{arguments.recipe.stem}.csv" if arguments.report else None


def _plan(arguments: argparse.Namespace) -> Exit:
    from pipeline.run.lease import Leases
    from pipeline.studies.status import requirements, state

    _, cells, folder = _trained(arguments)
    leases = Leases(folder)
    states = {cell.name: state(cell, folder, leases) for cell in cells}
    needs = requirements(cells, arguments.gpu) if arguments.gpu else {}
    for cell in cells:
        need = needs.get(cell.name)
        hours = f"{need.hours:8.2f} h  " if need and need.hours is not None else "       ? h  " if need else ""
        print(f"{states[cell.name]:8}  {hours}{cell.name}")
    done = [cell for cell in cells if states[cell.name] == "done"]
    print(f"{folder}: {len(done)} of {len(cells)} cells are done")
    if needs:
        rest = [needs[cell.name] for cell in cells if cell not in done]
        total = sum(need.hours or 0 for need in rest)
        size = sum(need.bytes for need in rest)
        print(f"the others take {total:.1f} hours on one {arguments.gpu}, {size / 1e9:.2f} GB of checkpoints")
    return Exit.DONE


def _run(arguments: argparse.Namespace) -> Exit:
    study, cells, folder = _trained(arguments)
    if table := _earlier(arguments):
        cells = _without_known(cells, study, table)
    missing = [cell for cell in cells if not cell.is_done(folder)]
    runner = _runner(arguments, cells, missing, folder)
    print(f"{folder}: {len(cells) - len(missing)} of {len(cells)} cells are done", flush=True)
    return runner().run(cells)


def _search(arguments: argparse.Namespace) -> Exit:
    from pipeline.files import atomic_write
    from pipeline.run.lease import hold
    from pipeline.studies.search import Range, as_csv, best, search

    check_least(arguments, 1, "trials")
    check_least(arguments, 0, "sampler_seed")
    if arguments.key not in keys():
        raise InputError(f"--key {arguments.key}: no such key{suggest(arguments.key, keys())}")
    _, cells, folder = _trained(arguments)
    span = Range(arguments.key, arguments.low, arguments.high, log=not arguments.linear)
    runner = _runner(arguments, cells, cells, folder)
    journal = folder / "search"
    journal.mkdir(exist_ok=True)
    with hold(journal):
        trials = search(cells, span, arguments.trials, folder, lambda own: runner().run(own), arguments.sampler_seed)
    if trials is None:
        return Exit.REQUEUE
    table = journal / f"{span.key}.csv"
    atomic_write(table, as_csv(trials, span))
    for point, trial in best(trials).items():
        print(
            f"{point}: best {span.key} {trial.value:g}, top-1 {trial.mean:.2f} +- {trial.std:.2f} % ({trial.seeds})"
        )
    print(f"all {len(trials)} trials are in {table}")
    return Exit.DONE


def _runner(
    arguments: argparse.Namespace, cells: "list[Cell]", missing: "list[Cell]", folder: Path
) -> "Callable[[], Runner]":
    """Check what the cells need, and the data of those that are missing; returns what makes a runner."""
    from pipeline.formats.manifest import read_manifest
    from pipeline.recipe import check_world
    from pipeline.studies.runner import Runner

    check_least(arguments, 1, "at_once", "ranks")
    for cell in cells:
        check_world(cell.recipe, arguments.ranks)
    for path in {cell.recipe.data.path for cell in missing}:
        read_manifest(Path(path))
    folder.mkdir(parents=True, exist_ok=True)
    return lambda: Runner(folder, arguments.at_once, arguments.ranks, _gpus())


def _without_known(cells: "list[Cell]", study: "Study", table: Path) -> "list[Cell]":
    """The cells that have no result in the table of an earlier report."""
    from pipeline.studies.results import known_rows

    if not table.is_file():
        raise InputError(f"--report {table.parent}: has no {table.name}; name the folder of an earlier report")
    known = known_rows(table, study)
    rest = [cell for cell in cells if cell.name not in known]
    print(f"{table}: has the results of {len(cells) - len(rest)} of {len(cells)} cells", flush=True)
    return rest


def _gpus() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _report(arguments: argparse.Namespace) -> Exit:
    from pipeline.studies.page import write_report
    from pipeline.studies.results import collect

    study, cells, folder = _read(arguments)
    results = collect(cells, folder, study, _earlier(arguments))
    done = sum(result.done for result in results)
    if not done:
        raise InputError(f"{folder}: none of the study's {len(cells)} cells is done there; `widemix study run` first")
    files = write_report(results, study, arguments.recipe, arguments.report or folder)
    print(f"{done} of {len(cells)} cells are done: {', '.join(map(str, files))}")
    return Exit.DONE


def _bounds(arguments: argparse.Namespace) -> Exit:
    from pipeline.files import atomic_write
    from pipeline.studies.bounds import as_csv, bounds, draw, strictly_smaller

    if not 1 <= arguments.depth <= 600:
        raise InputError(f"--depth {arguments.depth}: must be from 1 to 600")
    sizes = (arguments.width, arguments.tokens, arguments.heads)
    rows = bounds(range(1, arguments.depth + 1), *sizes)
    arguments.to.mkdir(parents=True, exist_ok=True)
    table, png, svg = (arguments.to / f"bounds.{suffix}" for suffix in ("csv", "png", "svg"))
    atomic_write(table, as_csv(rows))
    draw(rows, f"m = {arguments.width:,}, n = {arguments.tokens}, H = {arguments.heads}", [png, svg])
    print(as_csv(rows), end="")
    separated = [row.depth for row in rows if row.separated]
    applies = [row.depth for row in rows if strictly_smaller(row.depth, *sizes)]
    for text, depths in (
        ("the lower bound of transformers exceeds the upper one of Mixers", separated),
        ("conclusion 5.9 applies", applies),
    ):
        print(f"{text} at {f'{depths[0]} to {depths[-1]} layers' if depths else 'none of these depths'}")
    print(f"{table}, {png}, {svg}")
    return Exit.DONE
