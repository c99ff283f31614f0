"""Results of a study: one row for each cell, done or missing, and the mean over seeds for each point of a figure."""

import csv
import io
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import InputError
from pipeline.studies.cell import Cell
from pipeline.studies.quantity import MEASURED, is_number, value_of
from pipeline.studies.study import Figure, Study


@dataclass(frozen=True)
class Result:
    """A cell, where it is in the figure, and what its run has reached; empty values if it is missing."""

    cell: Cell
    x: float | str  # nan of a learning curve
    y: dict[str, float]  # by quantity; without those that are missing
    done: bool
    seconds: float = math.nan
    environment: dict = field(default_factory=dict)  # environment.json
    curve: list[dict] = field(default_factory=list)  # lines of metrics.jsonl, if x is epoch


@dataclass(frozen=True)
class Point:
    """A point of a line: mean and standard deviation over `count` of `wanted` seeds; nan where none is done."""

    x: float | str
    mean: float
    std: float  # of the sample (n - 1); nan for one seed
    count: int
    wanted: int


def collect(cells: Sequence[Cell], folder: Path, study: Study, table: Path | None = None) -> list[Result]:
    """Read the results of the cells from their run folders; cells that are not done have none.

    table: CSV file of an earlier report, which has the results of cells that were trained elsewhere.
    """
    rows = known_rows(table, study)
    return [_collect(cell, folder, study, rows.get(cell.name)) for cell in cells]


def known_rows(table: Path | None, study: Study) -> dict[str, dict[str, str]]:
    """Return the rows of finished cells in an earlier report, by the cells' names; none where there is no report.

    Learning curves are not in a table: a study that draws them has no known rows. Raises `InputError`.
    """
    if table is None or not table.exists() or not study.measured or study.figure.x == "epoch":
        return {}
    try:
        with table.open(newline="", encoding="utf-8") as file:
            rows = {row["run"]: row for row in csv.DictReader(file) if row["state"] == "done"}
        for row in rows.values():
            _measured(row)
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise InputError(f"{table}: is not the table of a report ({error!r}); move it away") from None
    return rows


def _measured(row: dict[str, str]) -> dict[str, float]:
    return {name: float(row[name]) if row[name] else math.nan for name in (*MEASURED, "seconds")}


def _collect(cell: Cell, folder: Path, study: Study, row: dict[str, str] | None = None) -> Result:
    figure, recipe = study.figure, cell.recipe
    x = math.nan if figure.x == "epoch" else value_of(figure.x, recipe)
    y = {}
    for name in figure.y:
        if name not in MEASURED and is_number(value := value_of(name, recipe)):
            y[name] = float(value)
    done = cell.result(folder)
    run = folder / cell.name
    if done is None and row is not None:
        measured = _measured(row)
        seconds = measured.pop("seconds")
        environment = {name: row.get(name) for name in ("host", "machine", "commit")}
        return Result(cell, x, y | measured, True, seconds, environment)
    if done is None:
        return Result(cell, x, y, done=not study.measured)
    curve = list(_metrics(run))
    try:
        seconds = float(done["seconds"])
        measured = {
            "error": 100 - float(done["top1"]) if done.get("top1") is not None else math.nan,
            "top1": float(done["top1"]) if done.get("top1") is not None else math.nan,
            "loss": float(done["loss"]) if done["loss"] is not None else math.nan,
            "train_loss": next((line["loss"] for line in reversed(curve) if line["split"] == "train"), math.nan),
            "epoch_seconds": seconds / recipe.train.epochs,
        }
        environment = json.loads((run / "environment.json").read_text())
        environment["machine"] = _machine(environment)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{run}: is not a finished run ({error})") from None
    return Result(cell, x, y | measured, True, seconds, environment, curve if figure.x == "epoch" else [])


def _machine(environment: dict) -> str:
    """What trained a run, in words."""
    device = environment.get("device", "unknown device")
    cpus = environment.get("usable_cpus", 1)
    return f"{cpus} CPU core{'s' * (cpus != 1)}" if device.startswith("cpu") else device


def _metrics(run: Path) -> Iterator[dict]:
    """The lines of metrics.jsonl; of a step that was repeated after a restart, the last."""
    lines: dict[tuple[str, int], dict] = {}
    path = run / "metrics.jsonl"
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
            lines[line["split"], line["step"]] = line
        except (ValueError, KeyError):
            continue
    return iter(sorted(lines.values(), key=lambda line: line["step"]))


def lines_of(results: Sequence[Result], panel: str, name: str, figure: Figure) -> dict[str, list[Point]]:
    """Return the points of each line of a panel, for the y called `name`, in the order of x.

    The cells of a point differ in their seed alone. Points whose top-1 has a standard deviation of `figure.max_std`
    or more are left out.
    """
    lines: dict[str, list[Point]] = {}
    for line in dict.fromkeys(result.cell.line for result in results if result.cell.panel == panel):
        own = [result for result in results if (result.cell.panel, result.cell.line) == (panel, line)]
        groups: dict[tuple, list[Result]] = {}
        for result in own:
            groups.setdefault(without_seed(result.cell), []).append(result)
        if figure.x == "epoch":
            lines[line] = _curve(own, name)
            continue
        kept = [group for group in groups.values() if not _too_spread(group, figure.max_std)]
        points = [_point(group[0].x, [r.y[name] for r in group if name in r.y], len(group)) for group in kept]
        numeric = all(is_number(point.x) for point in points)
        lines[line] = sorted(points, key=lambda point: point.x) if numeric else points
    return lines


def without_seed(cell: Cell) -> tuple:
    """What the cells of a point have in common: all that is varied, but the keys that have the value of the seed."""
    if cell.seed is None:
        return (cell.path, cell.varied)
    first = [key for key, _ in cell.varied].index("train.seed")  # and the entry's `seeded` keys, which follow it
    return (cell.path, cell.varied[:first])


def _too_spread(group: Sequence[Result], most: float | None) -> bool:
    values = [result.y["top1"] for result in group if "top1" in result.y]
    return most is not None and len(values) > 1 and statistics.stdev(values) >= most


def _point(x: float | str, values: Sequence[float], wanted: int) -> Point:
    values = [value for value in values if math.isfinite(value)]
    mean = statistics.fmean(values) if values else math.nan
    std = statistics.stdev(values) if len(values) > 1 else math.nan
    return Point(x, mean, std, len(values), wanted)


def _curve(results: Sequence[Result], name: str) -> list[Point]:
    """Mean over the runs of each evaluation, or of the train loss, by epoch."""
    split = "train" if name == "train_loss" else "eval"
    at: dict[float, list[float]] = {}
    for result in results:
        for line in result.curve:
            if line["split"] == split:
                error = 100 - line.get("top1", math.nan)
                value = error if name == "error" else line["loss" if name == "train_loss" else name]
                at.setdefault(line["epoch"], []).append(value)
    return [_point(epoch, values, len(results)) for epoch, values in sorted(at.items())]


def as_csv(results: Sequence[Result], study: Study) -> str:
    """Return the tidy table, one row a cell; missing cells have empty results."""
    keys = list(dict.fromkeys(key for result in results for key, _ in result.cell.varied if key != "train.seed"))
    names = list(dict.fromkeys([*MEASURED, *study.figure.y])) if study.measured else list(study.figure.y)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    own_x = [study.figure.x] if study.figure.x not in (*keys, "epoch") else []  # else a column already
    head = ["panel", "line", *keys, "seed", *own_x, *names]
    writer.writerow([*head, "epochs", "seconds", "state", "host", "machine", "commit", "run"])
    for result in results:
        cell, varied = result.cell, dict(result.cell.varied)
        row: list[object] = [cell.panel, cell.line, *(varied.get(key, "") for key in keys)]
        row += ["" if cell.seed is None else cell.seed, *([result.x] if own_x else [])]
        row += [*(_number(result.y.get(name, math.nan)) for name in names)]
        row += [cell.recipe.train.epochs, _number(result.seconds), "done" if result.done else "missing"]
        row += [result.environment.get(name) or "" for name in ("host", "machine")]
        row += [(result.environment.get("commit") or "")[:12], cell.name]
        writer.writerow(row)
    return text.getvalue()


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"
