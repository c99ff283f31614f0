"""The search before a study's runs: for each point the values of some keys with the best top-1 on a held-out split.

What is tried next follows from the results so far alone, so that a search that was stopped, killed or given more
trials is the one that was never interrupted.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from widemix.errors import InputError
from widemix.files import csv_text
from widemix.recipe.files import as_override
from widemix.studies.protocol import Range, Search
from widemix.studies.study_run import StudyRun

_PRIMES = (2, 3, 5, 7, 11, 13)
_ROUNDING = 1e-6  # of top-1, which rows have with six digits
Outcome = Callable[[StudyRun], float | None]  # top-1 of a trial, %; nan if it diverged; None if it has not ended


@dataclass(frozen=True)
class Trial:
    """Values that are tried, the run that tries them, and its top-1, %: nan if it diverged, None before it ends."""

    values: Mapping[str, float]
    study_run: StudyRun
    top1: float | None


@dataclass(frozen=True)
class Arm:
    """A point of the figure whose values are searched. study_runs: one for each seed. ranges: of its keys."""

    name: str
    study_runs: tuple[StudyRun, ...]
    ranges: Mapping[str, Range]
    search: Search

    def trial(self, values: Mapping[str, float]) -> StudyRun:
        """The run that tries the values; raises `InputError` if its recipe is invalid."""
        search, study_run = self.search, self.study_runs[0]
        if taken := {name for name, _ in study_run.varied} & {*search.set, *self.ranges, "data.eval_split"}:
            raise InputError(f"search: the study varies {min(taken)}")
        held = {"data.eval_split": search.split, **search.set}
        shared = (*study_run.shared, *(as_override(name, value) for name, value in held.items()))
        seeded = study_run.seeded or ("train.seed",)
        return replace(study_run, shared=shared, seed=search.seed, seeded=seeded, chosen=_as_chosen(values))

    def trials(self, outcome: Outcome) -> list[Trial]:
        """All trials in their order; while one has not ended, those that can be run beside it and none after."""
        found = [self._trial(_halton(self.ranges, number), outcome) for number in range(1, self.search.trials + 1)]
        while len(found) < self.search.trials + self.search.widen and all(one.top1 is not None for one in found):
            values = self._beyond(found)
            if values is None:
                break
            found.append(self._trial(values, outcome))
        return found

    def at_edge(self, trials: Sequence[Trial]) -> bool:
        """Whether the best value is the least or the greatest of those tried, and so a better one may lie beyond."""
        return self._beyond(trials) is not None

    def _trial(self, values: Mapping[str, float], outcome: Outcome) -> Trial:
        study_run = self.trial(values)
        return Trial(values, study_run, outcome(study_run))

    def _beyond(self, trials: Sequence[Trial]) -> dict[str, float] | None:
        """The best values with one of them moved out of what was tried; None if the best lies within it."""
        winner = best(trials, self.search.ties)
        if winner is None:
            return None
        tried = [trial.values for trial in trials]
        step = 1 / (round(self.search.trials ** (1 / len(self.ranges))) + 1)
        for name, span in self.ranges.items():
            value = winner.values[name]
            column = [values[name] for values in tried]
            for end, sign in ((min(column), -1), (max(column), 1)):
                moved = {**winner.values, name: span.at(span.fraction(value) + sign * step)}
                if value == end and moved not in tried and self._is_valid(moved):
                    return moved
        return None

    def _is_valid(self, values: Mapping[str, float]) -> bool:
        try:
            _ = self.trial(values).recipe
        except InputError:
            return False
        return True


def arms(study_runs: Iterable[StudyRun], search: Search, own: Sequence[Mapping[str, Range]]) -> list[Arm]:
    """The points of a study. own: the ranges that each of its entries has besides those of `search`."""
    points: dict[tuple, list[StudyRun]] = {}
    for study_run in study_runs:
        points.setdefault(study_run.point, []).append(study_run)
    found = []
    for group in points.values():
        first = group[0]
        name = ", ".join(filter(None, [first.panel, first.line, *(f"{key} {text}" for key, text in first.varied)]))
        ranges = {**search.keys, **own[first.group]}
        if len(ranges) > len(_PRIMES):
            raise InputError(f"search: {len(ranges)} keys for {name}; at most {len(_PRIMES)} can be searched at once")
        arm = Arm(name, tuple(group), ranges, search)
        for end in (0.0, 1.0):  # refused now, not in the first trial
            _ = arm.trial({key: span.at(end) for key, span in ranges.items()}).recipe
        found.append(arm)
    return found


def best(trials: Iterable[Trial], ties: float = 0.0) -> Trial | None:
    """The trial with the highest top-1, of equals the first; None if none has ended without diverging.

    ties: where it is above 0, of the trials that are at most so far below the highest, the one with the least values.
    """
    ended = [(trial.top1, trial) for trial in trials if trial.top1 is not None and math.isfinite(trial.top1)]
    highest, winner = max(ended, key=lambda one: one[0], default=(0.0, None))
    if not ties:
        return winner
    near = (trial for top1, trial in ended if top1 >= highest - ties - _ROUNDING)
    return min(near, key=lambda trial: tuple(trial.values.values()), default=None)


def chosen_runs(arm: Arm, trials: Sequence[Trial]) -> list[StudyRun]:
    """The runs of a point with the values that its trials have chosen; raises `InputError` if all diverged."""
    winner = best(trials, arm.search.ties)
    if winner is None:
        raise InputError(f"{arm.name}: all {len(trials)} trials diverged; give search.keys lower ranges")
    return [replace(study_run, chosen=_as_chosen(winner.values)) for study_run in arm.study_runs]


def as_csv(searched: Iterable[tuple[Arm, Sequence[Trial]]]) -> str:
    """Return the table of all trials; those that diverged or have not ended have no top-1."""
    rows = [(arm, trial) for arm, trials in searched for trial in trials]
    names = list(dict.fromkeys(name for _, trial in rows for name in trial.values))
    lines: list[list[object]] = [["point", *names, "top1", "state", "run"]]
    for arm, trial in rows:
        state = "missing" if trial.top1 is None else "done" if math.isfinite(trial.top1) else "diverged"
        numbers = [trial.values.get(name, "") for name in names]
        lines.append([arm.name, *numbers, trial.top1 if state == "done" else "", state, trial.study_run.name])
    return csv_text(lines)


def _as_chosen(values: Mapping[str, float]) -> tuple[tuple[str, str], ...]:
    return tuple((name, f"{value:g}") for name, value in values.items())


def _halton(ranges: Mapping[str, Range], number: int) -> dict[str, float]:
    """The values at a point, from 1, of the Halton sequence: one prime base for each key."""
    return {
        name: span.at(_radical_inverse(number, base))
        for (name, span), base in zip(ranges.items(), _PRIMES, strict=False)
    }


def _radical_inverse(number: int, base: int) -> float:
    """The digits of a number mirrored at the point: in base 2, the numbers 1, 2, 3 give 1/2, 1/4, 3/4."""
    result, place = 0.0, 1.0
    while number:
        place /= base
        number, digit = divmod(number, base)
        result += digit * place
    return result
