"""widemix runs and report: run folders side by side, and as an HTML page."""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from widemix.errors import Exit, InputError, command
from widemix.files import csv_text, write_output
from widemix.terminal import print

if TYPE_CHECKING:
    from widemix.run.listing import RunSummary

EXAMPLES = """widemix runs                        all runs in runs/
widemix runs runs/study             those in a folder
widemix runs diff runs/a runs/b     the recipe keys in which two runs differ
widemix runs csv > runs.csv         the list as CSV"""


MOST = 3  # keys of a row
_MORE = " more key"
_TELLING = ("model", "data", "optim", "schedule", "train", "augment")  # sections, the most telling first


def add_runs(commands) -> None:
    """Add `widemix runs`."""
    text = "list runs, or compare the recipes of two"
    parser = commands.add_parser(
        "runs",
        help=text,
        description="List runs with their state (done, stopped, or the time since their last line), accuracy, speed, "
        "hours and the recipe keys in which the runs of a folder differ: the first three, and all as CSV.",
        examples=EXAMPLES,
    )
    words = "folders to look into (default: runs); after the word diff two runs, after csv folders"
    parser.add_argument("words", nargs="*", metavar="[diff|csv] DIR", help=words)
    parser.set_defaults(command=_runs)


def _runs(arguments: argparse.Namespace) -> Exit:
    verb = arguments.words[0] if arguments.words[:1] in (["diff"], ["csv"]) else ""
    paths = [Path(word) for word in arguments.words[bool(verb) :]]
    if verb == "diff":
        return _diff(paths)
    from widemix.run.listing import find_runs, summarise

    found, damaged = [], []
    for run in find_runs(paths or [Path("runs")]):
        try:
            found.append(summarise(run))
        except InputError as error:
            damaged.append(error)
    if not found and damaged:
        raise damaged[0]
    for damage in damaged:
        print(f"warning: {damage}; the run is left out", file=sys.stderr)
    if not found:
        raise InputError(f"{', '.join(map(str, paths)) or 'runs'}: holds no runs")
    rows = _rows(found, of_csv=verb == "csv")
    if verb == "csv":
        print(csv_text(rows), end="")
        return Exit.DONE
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(table_lines(rows, width)))
    if any(_MORE in row[-1] for row in rows):
        print(f"{command('runs', 'diff', found[0].path, found[-1].path)} has all keys in which two runs differ")
    return Exit.DONE


def table_lines(rows: Sequence[Sequence[str]], width: int | None = None) -> Iterator[str]:
    """The lines of a table, of which the last two columns are text, the first as well.

    Where a line exceeds `width` characters, the last column is below the others, wrapped.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = (0, len(widths) - 2)  # aligned to the left, as the last, which is not padded
    for row in rows:
        cells = [
            cell.ljust(w) if c in texts else cell.rjust(w)
            for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        others, last = cells[:-1], row[-1]
        line = "  ".join([*others, last]).rstrip()
        if width is None or len(line) <= width:
            yield line
            continue
        yield "  ".join(others).rstrip()
        yield from textwrap.wrap(last, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _rows(found: "list[RunSummary]", of_csv: bool = False) -> list[tuple[str, ...]]:
    """The table with its head: a column for each kind of metric, and the keys in which the runs of a folder differ.

    of_csv: with all keys, not `MOST` and the number of the others, and as programs read numbers and their absence.
    """
    from widemix.metrics import metric_heading
    from widemix.recipe.yaml_text import yaml_text
    from widemix.run.listing import differing_keys

    most, absent, speed = (None, "", ".0f") if of_csv else (MOST, "-", ",.0f")
    folders = {run.path.parent for run in found}
    beside = {folder: [run for run in found if run.path.parent == folder] for folder in folders}
    # A run alone in its folder is compared with all.
    compared = {folder: runs if len(runs) > 1 else found for folder, runs in beside.items()}
    differing = {folder: differing_keys([run.recipe for run in runs]) for folder, runs in compared.items()}
    metrics = list(dict.fromkeys(run.metric for run in found))
    headings = map(metric_heading, metrics)
    best = ["best checkpoint"] if any(run.best for run in found) else []
    rows: list[tuple[str, ...]] = [("state", "step", *headings, "samples/s", "hours", *best, "run", "differs in")]
    for run in found:
        place = run.path.parent
        number = compared[place].index(run)
        shown = [run.cell(name) or absent for name in metrics]
        numbers = [(run.images_per_s, speed), (run.hours, ".2f")]
        shown += [absent if value is None else format(value, form) for value, form in numbers]
        own = [(name, values[number]) for name, values in differing[place] if values[number] is not ...]
        own.sort(key=_rank)
        shown += [run.best.sentence() if run.best else absent] if best else []
        words = [f"{name}={yaml_text(value)}" for name, value in own[:most]]
        more = len(own) - len(words)
        words += [f"{more}{_MORE}{'s' if more > 1 else ''}"] if more else []
        rows.append((run.state, f"{run.step}", *shown, str(run.path), ", ".join(words)))
    return rows


def _rank(key: tuple[str, object]) -> int:
    """How early a key is named, by its section; keys of one keep their order."""
    section = key[0].partition(".")[0]
    return _TELLING.index(section) if section in _TELLING else len(_TELLING)


def _diff(paths: list[Path]) -> Exit:
    from widemix.recipe.yaml_text import yaml_text
    from widemix.run.listing import compare_recipes

    if len(paths) != 2:
        raise InputError(f"runs diff: takes two runs, got {len(paths)}")
    differing = compare_recipes(*paths)
    for name, one, other in differing:
        print(f"{name}: {yaml_text(one)} -> {yaml_text(other)}")
    if not differing:
        print("the recipes are the same")
    return Exit.DONE


def add_report(commands) -> None:
    """Add `widemix report`."""
    parser = commands.add_parser(
        "report",
        help="write a page with curves, tables and recipe of runs",
        description="Write one HTML file about a run, or several runs compared: curves, evaluations, events, "
        "images, recipe and environment. It needs no other file and no network.",
        examples="widemix report runs/a                       write report.html\n"
        "widemix report runs/a runs/b --to ab.html   compare two runs\n"
        "widemix report runs/study --to study.html   all runs in a folder",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders that hold some")
    file = "file to write (default: report.html)"
    add("--to", dest="to_file", type=Path, default=Path("report.html"), metavar="FILE", help=file)
    parser.set_defaults(command=_report)


def _report(arguments: argparse.Namespace) -> Exit:
    from widemix.report.page import page
    from widemix.report.run import read_runs
    from widemix.run.listing import find_runs

    found = []
    for folder in arguments.runs:
        inside = list(find_runs([folder]))
        if not inside:
            raise InputError(f"{folder}: is not a run folder, and holds none")
        found += inside
    runs = read_runs(found)
    write_output(arguments.to_file, page(runs))
    print(f"{arguments.to_file}: {runs[0].path if len(runs) == 1 else f'{len(runs)} runs'}")
    return Exit.DONE
