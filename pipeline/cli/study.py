"""widemix study plan, run, report."""

import argparse
from pathlib import Path

from pipeline.cli.commands import Exit
from pipeline.errors import InputError, RunError


def add_study(commands) -> None:
    """Add `widemix study plan`, `run` and `report`."""
    parser = commands.add_parser(
        "study",
        help="train recipes that differ in a few keys, and compare them",
        description="List, train and draw the runs of a study file, such as recipes/studies/figure7.yaml. "
        "Its runs are called cells.",
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name, command, text in (
        ("plan", _plan, "print each cell: done or open, and its `widemix train` command"),
        ("run", _run, "train the cells that are not done, one after the other; the same command again continues"),
        ("report", _report, "write report.md and report.png about the cells that are done"),
    ):
        verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        verb.add_argument(
            "recipe",
            type=Path,
            nargs="+",
            metavar="STUDY.yaml",
            help="study file, such as recipes/studies/figure7.yaml",
        )
        verb.add_argument(
            "--to", type=Path, metavar="DIR", help="folder of the cells' run folders (default: runs/<first study>)"
        )
        verb.add_argument(
            "--only", default="*", metavar="PATTERN", help="only cells whose name matches, such as 'cifar10-*'"
        )
        if name != "report":
            verb.epilog = "Recipe keys as --section.key VALUE apply to all cells; `widemix train --help` lists them."
        if name == "run":
            verb.add_argument("--ranks", type=int, default=0, metavar="N", help="as in `widemix train`")
        verb.set_defaults(command=command)


def _cells(arguments: argparse.Namespace):
    from pipeline.studies.plan import read_studies

    folder = arguments.to or Path("runs") / arguments.recipe[0].stem
    return read_studies(arguments.recipe, arguments.overrides, arguments.only), folder


def _plan(arguments: argparse.Namespace) -> Exit:
    import shlex

    cells, folder = _cells(arguments)
    for cell in cells:
        words = ["widemix", "train", str(cell.path), "--run-dir", str(folder / cell.name)]
        words += [word for name, value in cell.overrides for word in (f"--{name}", value)]
        print(f"{'done' if cell.is_done(folder) else 'open'}  {shlex.join(words)}")
    return Exit.DONE


def _run(arguments: argparse.Namespace) -> Exit:
    from launch.local import launch
    from pipeline.cli.runs import count_ranks
    from pipeline.recipe import check_world

    cells, folder = _cells(arguments)
    ranks = count_ranks(arguments.ranks)
    for cell in cells:
        check_world(cell.recipe(), ranks)
    missing = [cell for cell in cells if not cell.is_done(folder)]
    print(f"{folder}: {len(cells) - len(missing)} of {len(cells)} cells are done", flush=True)
    failed = []
    for number, cell in enumerate(missing, 1):
        print(f"{cell.name}: {number} of {len(missing)}", flush=True)
        command = ["-m", "pipeline.train", str(cell.path), "--run-dir", str(folder / cell.name)]
        code = launch([*command, *(f"--{name}={value}" for name, value in cell.overrides)], ranks)
        if code in (Exit.REQUEUE, Exit.WRONG_INPUT):  # Ctrl-C; or wrong input, which is the same for the other cells
            return Exit(code)
        if code != Exit.DONE:
            failed.append(cell.name)
    if failed:
        raise RunError(
            f"{len(failed)} of {len(cells)} cells failed, {failed[0]} first; the same command trains them again"
        )
    return Exit.DONE


def _report(arguments: argparse.Namespace) -> Exit:
    from pipeline.studies.report import as_markdown, collect, write_report

    if arguments.overrides:
        raise InputError(f"--{arguments.overrides[0][0]}: a report has no overrides: its runs keep their recipes")
    cells, folder = _cells(arguments)
    points = collect(cells, folder)
    print(as_markdown(points), end="")
    print(f"{len(points)} of {len(cells)} cells are done: {', '.join(map(str, write_report(points, folder)))}")
    return Exit.DONE
