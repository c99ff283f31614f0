"""The table of a study's finished runs: STUDY.jsonl, a JSON line for each run, only ever appended to.

It is kept in a repository, so that a study can be spread over days and over machines that share nothing else: a run
that has a line is not trained again. Two tables are merged by putting their lines together.
"""

import itertools
import json
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from widemix.errors import InputError
from widemix.files import open_to_write, parse_json, read_regular, refuse_link, wait_for_lock
from widemix.run.listing import metrics
from widemix.studies.study_run import StudyRun
from widemix.terminal import print

_DIGITS = 6  # of measured numbers
# Commits of rows whose train_loss counts each line of the last epoch alike, also one of few steps at the run's end.
_BY_LINES = frozenset(
    (
        *("0e4c70b76de0", "0eca23f648a4", "2c351d168736", "3da88e430143", "3eabbe02e79c", "4822066c9ba8"),
        *("49bbc87f5122", "5be045d3524c", "85547d76162c", "8e2dbe7c7c37", "8e9a5cfd200b", "9a1ff8346382"),
        *("9c58e2bae2ae", "a93071971b09", "b120aac91a81", "b76b41bc4bf0", "f0ec69a7173a"),
    )
)


@dataclass(frozen=True)
class Row:
    """A finished run.

    run: its name, which has a hash of the recipe. state: done, or diverged: it ended since its loss was not finite,
    and ends so whenever it is trained. split: that it was evaluated on. metrics: of the last evaluation, and
    train_loss, the mean over the last epoch's steps. seconds: of training, wall clock. core_seconds: of all its
    processes, starts and evaluations included; None if it was not trained by `widemix study`. curve: a line for each
    epoch of each split.
    """

    run: str
    recipe: str  # the study's recipe that it started from, and its overrides
    state: Literal["done", "diverged"]
    seed: int
    split: str
    epochs: int
    metrics: dict[str, float | None]
    seconds: float | None
    core_seconds: float | None
    images_per_s: float | None
    commit: str
    machine: str
    host: str
    date: str
    curve: list[dict[str, Any]] = field(default_factory=list)

    @property
    def train_loss_over(self) -> str:
        """Whether train_loss is a mean over the last epoch's steps or, as in earlier commits, over its lines."""
        return "lines" if self.commit in _BY_LINES else "steps"

    def metric(self, name: str) -> float:
        """A metric, nan where it is not finite or was not measured."""
        value = self.metrics.get(name)
        return math.nan if value is None else float(value)


class Table:
    """The rows of a study, by the names of the runs. path: of STUDY.jsonl, which need not be there yet.

    A last line that was cut off, as by a full disk, is left out with a warning; any other that is no row raises
    `InputError`.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: dict[str, Row] = {}
        try:
            text = read_regular(path).decode(errors="replace") if path.exists() else ""
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
        *lines, rest = text.split("\n")
        for number, line in enumerate(lines, start=1):
            if line:
                row = _parse(line)
                if row is None:
                    raise InputError(f"{path}, line {number}: is not the line of a run; remove it")
                self.rows.setdefault(row.run, row)
        if rest:
            print(f"warning: {path}: its last line was cut off, and is left out", file=sys.stderr)

    def append(self, row: Row) -> None:
        """Add a row, on disk when this returns; once, also where other processes add rows to the file."""
        if row.run in self.rows:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        refuse_link(self.path)
        line = json.dumps(asdict(row), separators=(",", ":")) + "\n"
        with os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            with suppress(OSError):  # of a file system without locks
                wait_for_lock(file.fileno())
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]  # without what was cut off
            if f'"run":{json.dumps(row.run)},'.encode() not in whole:
                file.truncate(len(whole))
                file.seek(0, os.SEEK_END)
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        self.rows[row.run] = row

    def add_finished(self, study_runs: Iterable[StudyRun], folder: Path) -> None:
        """Add the rows of the runs that have a finished run in the folder, and none in the table."""
        for study_run in study_runs:
            if study_run.name not in self.rows and (row := finished_row(study_run, folder)) is not None:
                self.append(row)

    def row(self, study_run: StudyRun) -> Row | None:
        """The row of a run; None if it has not ended."""
        return self.rows.get(study_run.name)

    def missing(self, study_runs: Sequence[StudyRun]) -> list[StudyRun]:
        """The runs without a row."""
        return [study_run for study_run in study_runs if study_run.name not in self.rows]


def finished_row(study_run: StudyRun, folder: Path) -> Row | None:
    """Return the row of a run from its folder; None if it has not ended. Raises `InputError`."""
    run = folder / study_run.name
    done = study_run.result(folder)
    diverged = done is None and study_run.has_diverged(folder)
    if done is None and not diverged:
        return None
    try:
        lines = metrics(run)
        environment = parse_json(read_regular(run / "environment.json"))
        curve = _curve(lines)
        measured = {
            name: value
            for name, value in (done or {}).items()
            if name not in ("step", "seconds", "recipe") and (value is None or isinstance(value, (int, float)))
        }
        finite = done is not None and None not in measured.values()
        measured["train_loss"] = next((line["loss"] for line in reversed(curve) if line["split"] == "train"), None)
        speeds = [line["images_per_s"] for line in lines if "images_per_s" in line]
        return Row(
            run=study_run.name,
            recipe=shlex.join(
                [_place(study_run.path), *(f"--{name}={value}" for name, value in study_run.overrides)]
            ),
            state="done" if finite else "diverged",
            seed=study_run.recipe.train.seed,
            split=study_run.recipe.data.eval_split,
            epochs=study_run.recipe.train.epochs,
            metrics={name: None if value is None else _rounded(value) for name, value in measured.items()},
            seconds=float(done["seconds"]) if done else None,
            core_seconds=_core_seconds(folder, study_run),
            images_per_s=_rounded(statistics.median(speeds)) if speeds else None,
            commit=(environment.get("commit") or "unknown")[:12],
            machine=_machine(environment),
            host=str(environment.get("host", "unknown")),
            date=time.strftime("%Y-%m-%d"),
            curve=curve,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{run}: is not a finished run ({error})") from None


def add_core_seconds(folder: Path, study_run: StudyRun, seconds: float) -> None:
    """Note the CPU time that one start of a run took."""
    with open_to_write(_times(folder, study_run), "a") as file:
        file.write(f"{seconds:.1f}\n")


def _core_seconds(folder: Path, study_run: StudyRun) -> float | None:
    times = _times(folder, study_run)
    return round(sum(map(float, times.read_text().split())), 1) if times.exists() else None


def _times(folder: Path, study_run: StudyRun) -> Path:
    return folder / "logs" / f"{study_run.name}.core_seconds"


def _curve(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each epoch of each split: of training the mean loss over its steps, those of an interval counted in
    the epoch in which it ends; of a step that was repeated, the last."""
    last = {(line["split"], line["step"]): line for line in lines if line.get("split") in ("train", "eval")}
    epochs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for (split, _), line in sorted(last.items(), key=lambda item: item[0][1]):
        epochs.setdefault((split, math.ceil(line["epoch"])), []).append(line)
    ends = [0, *sorted(step for split, step in last if split == "train")]
    counts = {stop: stop - start for start, stop in itertools.pairwise(ends)}  # steps of each line
    curve = []
    for (split, epoch), own in epochs.items():
        if split == "train":
            losses, weights = ([line["loss"] for line in own], [counts[line["step"]] for line in own])
            point = {"epoch": epoch, "loss": statistics.fmean(losses, weights)}
        else:
            point = {name: own[-1][name] for name in ("epoch", "loss", "top1") if name in own[-1]}
        curve.append({"split": split, **{name: _rounded(value) for name, value in point.items()}})
    return curve


def _machine(environment: dict) -> str:
    """Return the device that trained a run, in words."""
    device = environment.get("device", "unknown device")
    cpus = environment.get("usable_cpus", 1)
    return f"{cpus} CPU core{'s' * (cpus != 1)}" if device.startswith("cpu") else device


def _place(path: Path) -> str:
    """A recipe's path, from the folder of the recipes on where it lies in one."""
    parts = path.resolve().parts
    return "/".join(parts[parts.index("recipes") :]) if "recipes" in parts else str(path)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _parse(line: str) -> Row | None:
    try:
        row = _ROW.validate_json(line, strict=True)
    except ValidationError:
        return None
    whole = row.epochs > 0 and all({"split", "epoch", "loss"} <= point.keys() for point in row.curve)
    return row if whole else None


_ROW = TypeAdapter(Row)
