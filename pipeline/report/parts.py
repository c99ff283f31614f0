"""Parts of the page: sections, tables, names of runs and numbers."""

from collections.abc import Iterable, Sequence
from itertools import count

from widemix.plots.chart import STYLES
from widemix.plots.html import Html, element, join
from widemix.report.run import ReportedRun
from widemix.run.records import is_number


def section(title: str, content: Html) -> Html:
    """Content below a title; nothing where there is no content."""
    if not content:
        return join()
    return element("section", "\n", element("h2", title), "\n", content, "\n") if title else content


def table(head: Iterable[object], rows: Iterable[Iterable[object]], numbers: Sequence[int] = ()) -> Html:
    """Return a table; the columns `numbers` are aligned to the right."""

    def cells(tag: str, row: Iterable[object]) -> Html:
        placed = zip(count(), row, strict=False)
        return join(*(element(tag, cell, class_="n" if place in numbers else None) for place, cell in placed))

    body = join(*(element("tr", cells("td", row)) for row in rows), between="\n")
    top = element("thead", element("tr", cells("th", head)))
    return element("div", element("table", "\n", top, "\n", element("tbody", body)), class_="scroll")


def chip(number: int) -> Html:
    """Return the mark of a run's curves, by its number on the page."""
    return element("span", class_=f"chip s{number % STYLES}{' dashed' if number // STYLES % 2 else ''}")


def named(runs: Sequence[ReportedRun], number: int) -> Html:
    """Return the name of a run, after the mark of its curves if there are several."""
    return join(*([chip(number)] if len(runs) > 1 else []), runs[number].name)


def formatted(value: object, form: str) -> str:
    """Format a number; a dash where there is none."""
    return format(value, form) if is_number(value) else "–"
