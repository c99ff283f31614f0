"""Run folders side by side, read from recipe.yaml, metrics.jsonl and done.json."""

import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from widemix.errors import InputError
from widemix.metrics import BY_CLASS, MEASURED, metric_cell
from widemix.recipe import Recipe, differences, flat_recipe, load_stored_recipe
from widemix.run import checkpoint
from widemix.run.choice import Best, best_of
from widemix.run.records import DONE, EVALUATION, EVALUATIONS, LINE, read_json, read_lines

_SOMETIMES = ("top5", *BY_CLASS)  # measured where there are enough classes, or unequal ones


@dataclass(frozen=True)
class RunSummary:
    """A run folder in a line. `value`, `images_per_s` and `hours` are None where the run has none yet.

    state: done; done early, with the epoch; stopped, with the step of its checkpoint; diverged; or the time since the
    last line of metrics.jsonl.
    best: the best checkpoint that is kept, with train.keep_best; None if there is none.
    metric: the name of the most telling one for what is predicted, such as top1; value: that of the last evaluation,
    in training or by `widemix eval`. images_per_s: the median of its lines. hours: of a run that is not done, those
    at its newest checkpoint.
    """

    path: Path
    recipe: Recipe
    state: str
    step: int
    metric: str
    value: float | None
    images_per_s: float | None
    hours: float | None
    best: Best | None = None

    def cell(self, metric: str) -> str:
        """The value as text, in a column of such metrics; empty where there is none."""
        return "" if metric != self.metric or self.value is None else metric_cell(metric, self.value)


def find_runs(folders: Iterable[Path]) -> Iterator[Path]:
    """The run folders at and below `folders`, sorted; `InputError` for a folder that is not there."""
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder; name run folders, or a folder that holds some")
        for place, names, files in os.walk(folder):
            names.sort()
            if "recipe.yaml" in files and "environment.json" in files:
                names.clear()
                yield Path(place)


def summarise(run: Path) -> RunSummary:
    """Read a run folder; `InputError` if its recipe cannot be read."""
    lines = metrics(run)
    trained = [line for line in lines if line.get("split") == "train"]
    recipe = load_stored_recipe(run / "recipe.yaml")
    metric = MEASURED[recipe.data.targets][0]
    speeds = [line["images_per_s"] for line in trained if "images_per_s" in line]
    own = (recipe.data.path, recipe.data.eval_split)
    values = [row.get(metric) for row in evaluated(run, lines, recipe) if (row["data"], row["split"]) == own]
    done = read_json(run / "done.json", DONE)
    newest = None if done else checkpoint.newest(run)
    seconds = done["seconds"] if done else newest.position.seconds if newest else None
    return RunSummary(
        path=run,
        recipe=recipe,
        state=_done(done) if done else _state(run, lines[-1] if lines else {}, newest),
        step=done["step"] if done else max((line["step"] for line in lines), default=0),
        metric=metric,
        value=done.get(metric) if done else values[-1] if values else None,
        images_per_s=statistics.median(speeds) if speeds else None,
        hours=None if seconds is None else seconds / 3600,
        best=best_of(run) if recipe.train.keep_best else None,
    )


def evaluated(run: Path, lines: Iterable[dict[str, Any]], recipe: Recipe, ema: bool = False) -> list[dict[str, Any]]:
    """Every evaluation of a run's weights, in training and by `widemix eval`, with step, data, split and metrics.

    In the order of steps; of several at a step on one split only the last. lines: those of its metrics.jsonl.
    """
    where, prefix = {"data": recipe.data.path, "split": recipe.data.eval_split}, "ema_" if ema else ""
    names, measured = (
        ("loss", *MEASURED[recipe.data.targets]),
        [line for line in lines if line.get("split") == "eval"],
    )
    names = tuple(name for name in names if name not in _SOMETIMES or any(prefix + name in line for line in measured))
    rows = [{"step": line["step"], **where, **{name: line.get(prefix + name) for name in names}} for line in measured]
    rows += [line for line in read_lines(run / EVALUATIONS, EVALUATION) if line["ema"] == ema]
    last = {(row["step"], row["data"], row["split"]): row for row in rows}
    return sorted(last.values(), key=itemgetter("step"))


def metrics(run: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics.jsonl; none if there is no such file."""
    return read_lines(run / "metrics.jsonl", LINE)


def compare_recipes(one: Path, other: Path) -> list[tuple[str, Any, Any]]:
    """The keys in which the recipes of two runs differ, each with both values."""
    for run in (one, other):
        if not (run / "recipe.yaml").is_file():
            raise InputError(f"{run}: is not a run folder (it has no recipe.yaml)")
    a, b = load_stored_recipe(one / "recipe.yaml"), load_stored_recipe(other / "recipe.yaml")
    values = [recipe.model_dump(mode="json") for recipe in (a, b)]
    return [(name, *(_value(dump, name) for dump in values)) for name in differences(a, b)]


def differing_keys(recipes: Sequence[Recipe]) -> list[tuple[str, list[Any]]]:
    """The keys that not all recipes share, each with its value in every recipe; `...` where one has no such key."""
    flat = [flat_recipe(recipe) for recipe in recipes]
    names = dict.fromkeys(name for keys in flat for name in keys)
    rows = [(name, [keys.get(name, ...) for keys in flat]) for name in names]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]


def _value(dump: dict[str, Any], name: str) -> Any:
    section, _, leaf = name.partition(".")
    return dump[section].get(leaf) if leaf else dump.get(section)


def _done(done: dict[str, Any]) -> str:
    """How a run has ended that is done."""
    early = done.get("ended_early")
    return f"done early, epoch {early['last_epoch']}" if early else "done"


def _state(run: Path, last: dict[str, Any], newest: checkpoint.Checkpoint | None) -> str:
    """How a run stands that is not done, by its last line."""
    if last.get("event") == "stopped":
        return f"stopped, checkpoint {newest.position.step}" if newest else "stopped"
    return "diverged" if last.get("event") == "diverged" else _age(run / "metrics.jsonl")


def _age(path: Path) -> str:
    if not path.exists():
        return "no line yet"
    minutes = (time.time() - path.stat().st_mtime) / 60
    return f"{minutes:.0f} min ago" if minutes < 120 else f"{minutes / 60:.0f} h ago"
