"""widemix runs: run folders side by side."""

import argparse
import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.commands import Exit
from pipeline.errors import InputError

if TYPE_CHECKING:
    from pipeline.run.listing import RunSummary

COLUMNS = ("state", "step", "top-1 %", "samples/s", "hours", "run", "differs in")
EXAMPLES = """examples:
  widemix runs                        all runs in runs/
  widemix runs runs/study             those in a folder
  widemix runs diff runs/a runs/b     the recipe keys in which two runs differ
  widemix runs csv > runs.csv         the list as CSV"""


def add_runs(commands) -> None:
    """Add `widemix runs`."""
    text = "list runs, or compare the recipes of two"
    parser = commands.add_parser(
        "runs",
        help=text,
        description="List runs with their state (done, or the time since their last line), accuracy, speed, hours "
        "and the recipe keys that not all of them share.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = "folders to look into (default: runs); after the word diff two runs, after csv folders"
    parser.add_argument("words", nargs="*", metavar="[diff|csv] DIR", help=words)
    parser.set_defaults(command=_runs)


def _runs(arguments: argparse.Namespace) -> Exit:
    verb = arguments.words[0] if arguments.words[:1] in (["diff"], ["csv"]) else ""
    paths = [Path(word) for word in arguments.words[bool(verb) :]]
    if verb == "diff":
        return _diff(paths)
    from pipeline.run.listing import find_runs, summarise

    found = [summarise(run) for run in find_runs(paths or [Path("runs")])]
    if not found:
        raise InputError(f"{', '.join(map(str, paths)) or 'runs'}: holds no runs")
    rows = [COLUMNS, *_rows(found)]
    if verb == "csv":
        csv.writer(sys.stdout).writerows(rows)
        return Exit.DONE
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS) - 1)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(row[c].rjust(widths[c]) for c in range(1, 5)), row[5].ljust(widths[5])]
        print("  ".join([*cells, row[6]]).rstrip())
    return Exit.DONE


def _rows(found: "list[RunSummary]") -> list[tuple[str, ...]]:
    """The lines of the table, with the keys in which the runs differ from each other."""
    flat = [_flat(run) for run in found]
    differing = [name for name in flat[0] if any(one.get(name) != flat[0][name] for one in flat)]
    differing += [name for one in flat[1:] for name in one if name not in flat[0] and name not in differing]
    rows = []
    for run, keys in zip(found, _values(flat, differing), strict=True):
        numbers = [(run.top1, ".2f"), (run.images_per_s, ",.0f"), (run.hours, ".2f")]
        shown = ["-" if value is None else format(value, form) for value, form in numbers]
        rows.append((run.state, f"{run.step}", *shown, str(run.path), keys))
    return rows


def _values(flat: list[dict[str, object]], names: list[str]) -> list[str]:
    """Of each run the values of these keys, as "key=value, key=value"."""
    unique = list(dict.fromkeys(names))
    return [", ".join(f"{name}={one[name]}" for name in unique if name in one) for one in flat]


def _flat(run: "RunSummary") -> dict[str, object]:
    dump = run.recipe.model_dump(mode="json", exclude={"plugins"})
    return {f"{section}.{name}": value for section, keys in dump.items() for name, value in keys.items()}


def _diff(paths: list[Path]) -> Exit:
    from pipeline.run.listing import compare_recipes

    if len(paths) != 2:
        raise InputError(f"runs diff: takes two runs, got {len(paths)}")
    differing = compare_recipes(*paths)
    for name, one, other in differing:
        print(f"{name}: {one} -> {other}")
    if not differing:
        print("the recipes are the same")
    return Exit.DONE
