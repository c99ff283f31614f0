"""Contents of a page about a run, read from its folder, also of one that was killed; tables and names of runs."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from widemix.errors import InputError
from widemix.plots.chart import STYLES, Html, element, join
from widemix.recipe import Recipe, dump_recipe
from widemix.run.listing import RunSummary, metrics, summarise
from widemix.run.records import CONFUSION, describe_event, is_number, read_json
from widemix.run.start_log import read_starts

IMAGES = {
    "first_batch": "The first training batch",
    "mistakes": "Misclassified at the last evaluation, the surest first",
}


@dataclass(frozen=True)
class ReportedRun:
    """A run folder. `name` tells it from the other runs of the page."""

    name: str
    summary: RunSummary
    lines: list[dict[str, Any]]  # of metrics.jsonl
    environment: dict[str, Any]
    starts: list[dict[str, Any]]  # of starts.jsonl

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.summary.path

    @property
    def recipe(self) -> Recipe:
        """Its recipe, defaults included."""
        return self.summary.recipe

    @cached_property
    def recipe_text(self) -> str:
        """Its recipe as YAML."""
        return dump_recipe(self.recipe)

    @property
    def began(self) -> float | None:
        """The time of the first line, s since 1970; None where no line has one."""
        return next((line["time"] for line in self.lines if "time" in line), None)

    def of(self, split: str) -> list[dict[str, Any]]:
        """The lines of a split: train, eval or event."""
        return [line for line in self.lines if line.get("split") == split]

    def events(self) -> Iterator[tuple[int, float | None, str]]:
        """Step, time (s since 1970, None if the line has none) and sentence of each event."""
        for line in self.of("event"):
            event = {name: value for name, value in line.items() if name not in ("time", "epoch")}
            yield line["step"], line.get("time"), describe_event(event)

    def images(self) -> Iterator[tuple[str, bytes]]:
        """Title and PNG of each image in images/."""
        for name, title in IMAGES.items():
            path = self.path / f"images/{name}.png"
            if path.is_file():
                yield title, path.read_bytes()

    def confusion(self) -> dict[str, Any] | None:
        """The content of confusion.json: step, classes, and counts [true class][predicted class]."""
        return read_json(self.path / "confusion.json", CONFUSION)


def read_run(path: Path, name: str) -> ReportedRun:
    """Read a run folder; `InputError` if it is none."""
    if not (path / "recipe.yaml").is_file():
        raise InputError(f"{path}: is not a run folder (it has no recipe.yaml)")
    environment = read_json(path / "environment.json") or {}
    return ReportedRun(name, summarise(path), metrics(path), environment, read_starts(path))


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Read run folders, each once, with names that tell them apart."""
    unique = list({path.resolve(): path for path in paths}.values())
    return [read_run(path, name) for path, name in zip(unique, short_paths(unique), strict=True)]


def short_paths(paths: Sequence[Path]) -> list[str]:
    """The paths without the folder that they share: runs/a, runs/b/c -> a, b/c; of one path its name."""
    whole = [str(path.resolve()) for path in paths]
    shared = os.path.commonpath([os.path.dirname(path) for path in whole])
    return [os.path.relpath(path, shared) for path in whole]


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
