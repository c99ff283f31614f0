"""Parts of the page: sections, tables, names of runs and numbers, as HTML."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import count

from widemix.plots.chart import STYLES
from widemix.report.run import ReportedRun


def section(title: str, content: str) -> str:
    """Content below a title; nothing where there is no content."""
    if not content:
        return ""
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>" if title else content


def table(head: Iterable[str], rows: Iterable[Iterable[str]], numbers: Sequence[int] = ()) -> str:
    """Return a table of cells that are HTML already; the columns `numbers` are aligned to the right."""

    def cells(tag: str, row: Iterable[str]) -> str:
        opened = (f'<{tag} class="n">' if place in numbers else f"<{tag}>" for place in count())
        return "".join(f"{start}{cell}</{tag}>" for start, cell in zip(opened, row, strict=False))

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    top = f"<thead><tr>{cells('th', head)}</tr></thead>"
    return f'<div class="scroll"><table>\n{top}\n<tbody>{body}</tbody></table></div>'


def chip(number: int) -> str:
    """Return the mark of a run's curves, by its number on the page."""
    return f'<span class="chip s{number % STYLES}{" dashed" if number // STYLES % 2 else ""}"></span>'


def named(runs: Sequence[ReportedRun], number: int) -> str:
    """Return the name of a run, after the mark of its curves if there are several."""
    return f"{chip(number) if len(runs) > 1 else ''}{escape(runs[number].name)}"


def formatted(value: float | None, form: str) -> str:
    """Format a number; a dash where there is none."""
    return "–" if value is None else format(value, form)
