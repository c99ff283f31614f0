"""Results of a study: one row for each run, done or missing, and the mean over seeds for each point of a figure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from widemix.files import csv_text
from widemix.studies.protocol import Figure
from widemix.studies.quantity import MEASURED, is_number, label_of, value_of
from widemix.studies.rows import Row, Table
from widemix.studies.study import Study
from widemix.studies.study_run import StudyRun


@dataclass(frozen=True)
class Result:
    """A run, where it is in the figure, and its row; None if it has not ended, or needs no run."""

    study_run: StudyRun
    x: float | str  # nan of a learning curve
    y: dict[str, float]  # by quantity; without those that are missing, and nan where the run diverged
    row: Row | None = None

    @property
    def diverged(self) -> bool:
        """Whether the run ended without a result."""
        return self.row is not None and self.row.state == "diverged"


@dataclass(frozen=True)
class Point:
    """A point of a line: mean and standard deviation over `count` of `wanted` seeds; nan where none is done."""

    x: float | str
    mean: float
    std: float  # of the sample (n - 1); nan for one seed
    count: int
    wanted: int
    diverged: int = 0  # of the seeds that are wanted


def measured_label(name: str, results: Sequence[Result]) -> str:
    """The text of a quantity's axis: errors are of the test split unless all runs were evaluated on a hold-out."""
    held_out = all(result.study_run.recipe.data.eval_split == "holdout" for result in results)
    return label_of(name, "held-out" if held_out else "test")


def collect(study_runs: Sequence[StudyRun], table: Table, study: Study) -> list[Result]:
    """Return the results of the runs, from the rows of the study's table."""
    return [_collect(study_run, table, study) for study_run in study_runs]


def _collect(study_run: StudyRun, table: Table, study: Study) -> Result:
    figure, recipe = study.figure, study_run.recipe
    x = math.nan if figure.x == "epoch" else value_of(figure.x, recipe)
    y = {}
    for name in figure.y:
        if name not in MEASURED and is_number(value := value_of(name, recipe)):
            y[name] = float(value)
    row = table.row(study_run)
    if row is None:
        return Result(study_run, x, y)
    return Result(study_run, x, y | {name: measured(row, name) for name in MEASURED}, row)


def measured(row: Row, name: str) -> float:
    """A result of a run by its name in `MEASURED`; nan where it has none."""
    if row.state == "diverged":
        return math.nan
    if name == "error":
        return 100 - row.metric("top1")
    if name == "epoch_seconds":
        evaluated = (line["epoch"] for line in row.curve if line["split"] == "eval")
        epochs = max(evaluated, default=row.epochs)  # fewer than the recipe's with train.max_steps
        return math.nan if row.seconds is None else row.seconds / epochs
    return row.metric(name)


def lines_of(results: Sequence[Result], panel: str, name: str, figure: Figure) -> dict[str, list[Point]]:
    """Return the points of each line of a panel, for the y called `name`, in the order of x.

    The runs of a point differ in their seed alone. Points whose top-1 has a standard deviation of `figure.max_std`
    or more are left out.
    """
    lines: dict[str, list[Point]] = {}
    for line in dict.fromkeys(result.study_run.line for result in results if result.study_run.panel == panel):
        own = [result for result in results if (result.study_run.panel, result.study_run.line) == (panel, line)]
        groups: dict[tuple, list[Result]] = {}
        for result in own:
            groups.setdefault(result.study_run.point, []).append(result)
        if figure.x == "epoch":
            lines[line] = _curve(own, name)
            continue
        kept = [group for group in groups.values() if not _too_spread(group, figure.max_std)]
        points = [_point(group[0].x, [r.y[name] for r in group if name in r.y], group) for group in kept]
        numeric = all(is_number(point.x) for point in points)
        lines[line] = sorted(points, key=lambda point: point.x) if numeric else points
    return lines


def ends_of(results: Sequence[Result], panel: str, name: str) -> dict[str, list[Point]]:
    """The results of each line of a panel of learning curves, as one point at its last epoch.

    That of runs that diverged is not the last evaluation that they had.
    """
    lines: dict[str, list[Result]] = {}
    for result in results:
        if result.study_run.panel == panel:
            lines.setdefault(result.study_run.line, []).append(result)
    last = {line: max(map(_last_epoch, own)) for line, own in lines.items()}
    latest = max(last.values()) or results[0].study_run.recipe.train.epochs  # for lines without a result
    return {
        line: [_point(last[line] or latest, [result.y.get(name, math.nan) for result in own], own)]
        for line, own in lines.items()
    }


def _last_epoch(result: Result) -> float:
    """The last of a run's learning curve; 0 where it has none, or diverged."""
    known = () if result.row is None or result.diverged else result.row.curve
    return max((line["epoch"] for line in known), default=0)


def _too_spread(group: Sequence[Result], most: float | None) -> bool:
    values = [result.y["top1"] for result in group if math.isfinite(result.y.get("top1", math.nan))]
    return most is not None and len(values) > 1 and statistics.stdev(values) >= most


def _point(x: float | str, values: Sequence[float], group: Sequence[Result]) -> Point:
    values = [value for value in values if math.isfinite(value)]
    mean = statistics.fmean(values) if values else math.nan
    std = statistics.stdev(values) if len(values) > 1 else math.nan
    return Point(x, mean, std, len(values), len(group), sum(result.diverged for result in group))


def _curve(results: Sequence[Result], name: str) -> list[Point]:
    """Mean over the runs of each evaluation, or of the train loss, by epoch."""
    split = "train" if name == "train_loss" else "eval"
    at: dict[float, list[float]] = {}
    for result in results:
        for line in result.row.curve if result.row else ():
            if line["split"] == split:
                error = 100 - line.get("top1", math.nan)
                value = error if name == "error" else line["loss" if name == "train_loss" else name]
                at.setdefault(line["epoch"], []).append(value)
    return [_point(epoch, values, results) for epoch, values in sorted(at.items())]


def as_csv(results: Sequence[Result], study: Study) -> str:
    """Return the tidy table, one row a run; missing runs have empty results."""
    keys = list(dict.fromkeys(key for result in results for key, _ in result.study_run.own if key != "train.seed"))
    logged = [name for name in MEASURED if name != "zero_weights"]  # which few runs have
    names = list(dict.fromkeys([*logged, *study.figure.y])) if study.measured else list(study.figure.y)
    names = [name for name in names if name not in keys]
    own_x = [study.figure.x] if study.figure.x not in (*keys, *names, "epoch") else []  # else a column already
    head: list[object] = ["panel", "line", *keys, "seed", *own_x, *names]
    rest = ["epochs", "seconds", "core_seconds", "state", "host", "machine", "commit", "train_loss_over", "run"]
    lines = [[*head, *rest]]
    for result in results:
        study_run, values, row = result.study_run, dict(result.study_run.own), result.row
        line: list[object] = [study_run.panel, study_run.line, *(values.get(key, "") for key in keys)]
        line += ["" if study_run.seed is None else study_run.seed, *(_number(result.x) for _ in own_x)]
        line += [*(_number(result.y.get(name, math.nan)) for name in names), study_run.recipe.train.epochs]
        if row is not None:
            line += [_number(row.seconds), _number(row.core_seconds), row.state, row.host, row.machine, row.commit]
            line.append(row.train_loss_over)
        else:
            line += ["", "", "missing" if study.measured else "done", "", "", "", ""]
        lines.append([*line, study_run.name])
    return csv_text(lines)


def _number(value: object) -> object:
    """A number as text: whole ones with all digits, others with six; empty for nan and None."""
    if value is None or not isinstance(value, float):
        return "" if value is None else value
    if math.isnan(value):
        return ""
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.6g}"
