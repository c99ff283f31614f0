"""widemix study results, bounds: what needs no run."""

import argparse
import math
import os
from pathlib import Path

from widemix.errors import Exit, InputError
from widemix.terminal import print


def add_results(verbs) -> None:
    """Add `widemix study results`."""
    text = "write one page about all figures and tables of the papers: claims, verdicts, costs, and what is open"
    verb = verbs.add_parser(
        "results",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. It is made of the study files, the committed tables and "
        "recipes/papers.yaml alone.",
    )
    from widemix.estimate.hardware import GPUS

    add = verb.add_argument
    tables = Path("recipes/studies/results")
    add("--report", type=Path, default=tables, metavar="DIR", help=f"folder of the tables (default: {tables})")
    page = Path("docs/results.md")
    add("--to", dest="to_file", type=Path, default=page, metavar="FILE", help=f"the page (default: {page})")
    add("--readme", type=Path, metavar="FILE", help="page that has the numbers in one line between two comments")
    add("--gpu", choices=tuple(GPUS), help="first compute the hours of the full studies on one GPU of this kind")
    verb.set_defaults(command=_results)


def _results(arguments: argparse.Namespace) -> Exit:
    from widemix.estimate.recipe_tables import split_between
    from widemix.files import atomic_write
    from widemix.recipe.files import SHIPPED
    from widemix.studies.figure import plot_statements
    from widemix.studies.papers import FULL_SIZE, full_size_csv, read_papers
    from widemix.studies.results_page import STATEMENTS, results_page

    if not arguments.report.is_dir():
        raise InputError(f"--report {arguments.report}: no such folder")
    if arguments.readme:  # before the work, and the page, which is not written where this one lacks the lines
        begin = "<!-- written by `widemix study results --readme README.md` -->\n"
        before, after = split_between(arguments.readme, begin, "<!-- end -->\n")
    papers, studies = read_papers(), SHIPPED / "studies"
    if arguments.gpu:
        atomic_write(arguments.report / FULL_SIZE, full_size_csv(papers, studies, arguments.gpu))
    links = os.path.relpath(arguments.report, arguments.to_file.parent)
    page, numbers, statements = results_page(papers, studies, arguments.report, links)
    plot_statements(statements, [arguments.to_file.with_name(STATEMENTS)])
    if arguments.readme:
        atomic_write(arguments.readme, f"{before}{numbers}\n{after}")
    atomic_write(arguments.to_file, page)
    print(f"{arguments.to_file}: {numbers}")
    return Exit.DONE


def add_bounds(verbs) -> None:
    """Add `widemix study bounds`."""
    text = "compute the separation-rank bounds of Mixers and transformers by depth"
    source = "(Navon & Bronstein 2023, theorems 5.5 to 5.7, conclusion 5.9)"
    verb = verbs.add_parser("bounds", help=text, description=f"{text[0].upper()}{text[1:]} {source}.")
    verb.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder for bounds.csv, .png and .svg")
    verb.add_argument("--width", type=int, default=3**30, metavar="M", help="width of a token (default: 3^30)")
    verb.add_argument("--tokens", type=int, default=196, metavar="N", help="tokens (default: 196)")
    verb.add_argument("--heads", type=int, default=12, metavar="H", help="attention heads (default: 12)")
    verb.add_argument("--depth", type=int, default=24, metavar="P", help="greatest number of layers (default: 24)")
    verb.set_defaults(command=_bounds)


def _bounds(arguments: argparse.Namespace) -> Exit:
    from widemix.files import atomic_write
    from widemix.studies.bounds import as_csv, bounds, plot, strictly_smaller

    if not 1 <= arguments.depth <= 600:
        raise InputError(f"--depth {arguments.depth}: must be from 1 to 600")
    sizes = (arguments.width, arguments.tokens, arguments.heads)
    rows = bounds(range(1, arguments.depth + 1), *sizes)
    arguments.to.mkdir(parents=True, exist_ok=True)
    table, png, svg = (arguments.to / f"bounds.{suffix}" for suffix in ("csv", "png", "svg"))
    atomic_write(table, as_csv(rows))
    plot(rows, f"m = {_power(arguments.width)}, n = {arguments.tokens}, H = {arguments.heads}", [png, svg])
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


def _power(width: int) -> str:
    """A number as a figure shows it: a power of 3, of which the theorems speak, as such."""
    exponent = round(math.log(width, 3))
    return f"$3^{{{exponent}}}$" if width == 3**exponent and exponent > 4 else f"{width:,}"
