"""widemix report: runs as an HTML page."""

import argparse
from pathlib import Path

from widemix.errors import Exit, InputError
from widemix.files import write_output
from widemix.terminal import print

EXAMPLES = """widemix report runs/a                       write report.html
widemix report runs/a runs/b --to ab.html   compare two runs
widemix report runs/study --to study.html   all runs in a folder"""


def add_report(commands) -> None:
    """Add `widemix report`."""
    parser = commands.add_parser(
        "report",
        help="write a page with curves, tables and recipe of runs",
        description="Write one HTML file about a run, or several runs compared: curves, evaluations, events, "
        "images, recipe and environment. It needs no other file and no network.",
        examples=EXAMPLES,
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
