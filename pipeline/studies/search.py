"""Searches the value of one recipe key, at each point of a study, with the best mean top-1 over the seeds, by Optuna.

The cells of a trial are ordinary cells of the study with the key set to the trial's value: they have run folders of
their own, are trained by the study's runner, and continue where they were stopped.
"""

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.cli.commands import Exit
from pipeline.errors import InputError, RunError
from pipeline.studies.cell import Cell
from pipeline.studies.results import without_seed

_JOURNAL = "trials.journal"
_FAILED = "failed"


@dataclass(frozen=True)
class Range:
    """Where a key is searched: from `low` to `high`, evenly or, with `log`, evenly on a logarithmic axis."""

    key: str
    low: float
    high: float
    log: bool

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise InputError(f"--low {self.low:g} --high {self.high:g}: the first must be smaller than the second")
        if self.log and self.low <= 0:
            raise InputError(f"--low {self.low:g}: must be above 0 on a logarithmic axis; or add --linear")

    def cell(self, cell: Cell, value: float) -> Cell:
        """A cell with the key at a value of three digits, before the keys that have the value of the seed."""
        if self.key in dict(cell.varied):
            raise InputError(f"--key {self.key}: the study varies it")
        place = len(without_seed(cell)[1])
        own = (self.key, f"{value:.3g}")
        return replace(cell, varied=(*cell.varied[:place], own, *cell.varied[place:]))


@dataclass(frozen=True)
class Trial:
    """One value at one point: mean and standard deviation of top-1 over `seeds` runs, %; nan if it failed."""

    point: str
    value: float
    mean: float
    std: float
    seeds: int


def search(
    cells: Iterable[Cell],
    span: Range,
    trials: int,
    folder: Path,
    run: Callable[[Sequence[Cell]], Exit],
    seed: int = 0,
) -> list[Trial] | None:
    """Try `trials` values at each point; returns all trials, or None if `run` was stopped.

    folder: of the study; its search/trials.journal has the trials; the same call adds those that are missing.
    run: trains cells that are not done, and raises `RunError` if one fails, which the search then avoids.
    """
    optuna = _optuna()
    state = optuna.trial.TrialState
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(folder / "search" / _JOURNAL))
    )
    found = []
    for point, own in _points(cells).items():
        for end in (span.low, span.high):
            _ = span.cell(own[0], end).recipe  # refused now, not in the first trial
        study = optuna.create_study(
            storage=storage,
            study_name=f"{span.key} {span.low:g} to {span.high:g}{' log' * span.log} {own[0].name}",
            load_if_exists=True,
            direction="maximize",
            sampler=optuna.samplers.TPESampler(seed=seed),
        )
        for trial in study.get_trials(states=[state.RUNNING]):  # of a search that was stopped: once more
            study.tell(trial.number, state=state.FAIL)
            if trial.params:
                study.enqueue_trial(trial.params, skip_if_exists=False)
        while (number := len(_ended(study))) < trials:
            trial = study.ask()
            value = trial.suggest_float(span.key, span.low, span.high, log=span.log)
            print(f"{point}, {span.key} {value:.3g}: trial {number + 1} of {trials}", flush=True)
            tried = [span.cell(cell, value) for cell in own]
            try:
                if run(tried) != Exit.DONE:
                    return None
                study.tell(trial, statistics.fmean(_top1(tried, folder)))
            except RunError as error:
                print(f"{point}, {span.key} {value:.3g}: failed ({error})", flush=True)
                trial.set_user_attr(_FAILED, True)
                study.tell(trial, 0.0)  # a trial without a value would not keep the sampler away
        for trial in _ended(study):
            value = trial.params[span.key]
            top1 = [] if _FAILED in trial.user_attrs else _top1([span.cell(cell, value) for cell in own], folder)
            mean = statistics.fmean(top1) if top1 else math.nan
            std = statistics.stdev(top1) if len(top1) > 1 else math.nan
            found.append(Trial(point, float(f"{value:.3g}"), mean, std, len(top1)))
    return found


def best(trials: Iterable[Trial]) -> dict[str, Trial]:
    """Return the trial with the highest mean of each point; points without one that ended well are left out."""
    found: dict[str, Trial] = {}
    for trial in trials:
        if math.isfinite(trial.mean) and (trial.point not in found or trial.mean > found[trial.point].mean):
            found[trial.point] = trial
    return found


def as_csv(trials: Iterable[Trial], span: Range) -> str:
    """Return the table of the trials; those that failed have no mean."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["point", span.key, "top1", "std", "seeds"])
    for trial in trials:
        numbers = ["" if math.isnan(number) else f"{number:.6g}" for number in (trial.mean, trial.std)]
        writer.writerow([trial.point, f"{trial.value:g}", *numbers, trial.seeds])
    return text.getvalue()


def _points(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """The cells of each point, which differ in their seed alone, by what tells the point from others."""
    points: dict[tuple, list[Cell]] = {}
    for cell in cells:
        points.setdefault(without_seed(cell), []).append(cell)
    names = {}
    for own in points.values():
        varied = [f"{key} {text}" for key, text in without_seed(own[0])[1]]
        names[", ".join([*filter(None, [own[0].panel, own[0].line]), *varied])] = own
    return names


def _ended(study: Any) -> list[Any]:
    """The trials with a value: not those that were stopped."""
    return [trial for trial in study.get_trials() if trial.value is not None]


def _top1(cells: Iterable[Cell], folder: Path) -> list[float]:
    """Of finished runs; raises `RunError` if one is not finished, or its last evaluation was not finite."""
    found = []
    for cell in cells:
        result = cell.result(folder)
        if result is None or result["top1"] is None:
            raise RunError(f"{cell.name}: {'is not done' if result is None else 'its top-1 is not finite'}")
        found.append(float(result["top1"]))
    return found


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError:
        raise InputError("the search is Optuna's: pip install 'widemix[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
