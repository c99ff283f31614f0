"""Verdicts on a study's claims: difference, interval, and one word.

docs/explanation/protocol.md, section 3, has the tests and the rules by which each word follows from them.
"""

import math
import statistics
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from widemix.errors import InputError
from widemix.studies.estimates import (
    LEVEL,
    Estimate,
    exact,
    holm,
    holm_factors,
    p_above,
    paired_estimate,
    quantile,
    welch_estimate,
)
from widemix.studies.points import Result
from widemix.studies.protocol import Claim, Place, Statement
from widemix.studies.quantity import MEASURED, as_quantity, is_number, value_of
from widemix.studies.study import Study

_POWER = 0.8
_ROUNDING = 2e-5  # of the values, which rows have with six digits: how far apart differences are that are the same


@dataclass(frozen=True)
class Verdict:
    """Verdict of the runs on a claim. p: Holm's, over all claims of the study.

    detectable: how far beyond the border of the claim, 0 or its margin, a difference must be for this many seeds to
    find it in 80 % of cases, at the level that Holm's correction leaves to this claim.
    word: supported, contradicted, undecided; or with missing runs, with a diverged run or below a linear baseline,
    with nan for all numbers; or regime not reached, with the difference. by_margin: the margin alone decides.
    note: which points were left out, or what condition is unmet.
    """

    claim: Statement
    word: str
    estimate: Estimate | None = None
    p: float = math.nan
    detectable: float = math.nan
    by_margin: bool = False
    note: str = ""

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, of this claim alone; nan without an estimate."""
        return (math.nan, math.nan) if self.estimate is None else self.estimate.interval

    @property
    def size(self) -> float:
        """The difference in units of its margin or, without one, of half its interval; 0 where it has no error."""
        if self.estimate is None or self.estimate.exact:
            return 0.0
        unit = self.claim.margin or self.estimate.mean - self.interval[0]
        return self.estimate.mean / unit if unit else math.copysign(math.inf, self.estimate.mean)


def verdicts(results: Sequence[Result], study: Study, below: Set[tuple] = frozenset()) -> list[Verdict]:
    """Return the verdict on each claim of the study; one without a panel is decided in each panel by itself.

    below: the points that are below a linear baseline. Raises `InputError` for a claim about no point of the figure.
    """
    panels = list(dict.fromkeys(result.study_run.panel for result in results))
    claims = [each for claim in study.claims for each in _in_panels(claim, panels)]
    unable, estimates = [], []
    for claim in claims:
        own = [result for result in results if result.study_run.panel == claim.panel]
        kept, lost = _above_baselines(claim, own, below)
        word = "" if kept else "below a linear baseline"
        if any(result.diverged for place in claim.places for result in kept if _is_at(place, result)):
            word = "with a diverged run"
        estimate = None if word else _estimate(claim, kept, study)
        if estimate is not None and (unmet := _unmet(claim, own)):
            word, lost = "regime not reached", unmet
        unable.append(Verdict(claim, word, estimate, note=lost))
        estimates.append(None if word else estimate)
    return [
        verdict if verdict.word else replace(decided, note=verdict.note)
        for verdict, decided in zip(unable, decide(claims, estimates), strict=True)
    ]


def _above_baselines(claim: Claim, own: Sequence[Result], below: Set[tuple]) -> tuple[list[Result], str]:
    """The results without the claim's points that are below a linear baseline and what the other side has at their
    values, and which these are, in words; no results where what is left is no comparison.
    """
    sides = [[result for result in own if _is_at(place, result)] for place in claim.places]
    for place in (*claim.places, *claim.regime):
        if not any(_is_at(place, result) for result in own):
            where = " and ".join(f"{name} {value}" for name, value in place.at.items())
            raise InputError(f"claims: {claim.text}: no point of the figure has line {place.line} {where}".rstrip())
    lost = {result.study_run.varied for side in sides for result in side if result.study_run.point in below}
    kept = [result for result in own if result.study_run.varied not in lost]
    counts = [
        [len({result.study_run.point for result in each if _is_at(place, result)}) for place in claim.places]
        for each in (own, kept)
    ]
    torn = len(set(counts[0])) < len(set(counts[1]))  # points that had no counterpart
    if not all(counts[1]) or torn or (claim.slope is not None and counts[1][0] == 1 < counts[0][0]):
        return [], ""
    words = "; ".join(" ".join(map(" ".join, varied)) for varied in sorted(lost))
    return kept, words and f"without {words}, below a linear baseline"


def _unmet(claim: Claim, own: Sequence[Result]) -> str:
    """The first condition of a claim that its runs do not meet, and what they have; empty if they meet all."""
    for one in claim.regime:
        rows = [result.y for result in own if _is_at(one, result) and not result.diverged]
        values = [row.get(one.y, math.nan) - (row.get(one.minus, math.nan) if one.minus else 0.0) for row in rows]
        mean = statistics.fmean(values) if values else math.nan
        name = f"{one.y} - {one.minus}" if one.minus else one.y
        for border, word, met in (
            (one.above, "above", mean > (one.above or 0.0)),
            (one.below, "below", mean < (one.below or 0.0)),
        ):
            if border is not None and not met:
                return f"{name} of {one.line} is {mean:.3g}, not {word} {border:g}"
    return ""


def decide(statements: Sequence[Statement], estimates: Sequence[Estimate | None]) -> list[Verdict]:
    """Return the verdict on each statement, as one family. An estimate of None: its runs are missing."""
    tests = {
        number: _test(statement.expect, statement.margin, estimate)
        for number, (statement, estimate) in enumerate(zip(statements, estimates, strict=True))
        if estimate is not None
    }
    p_values = {number: p for number, (p, _) in tests.items()}
    adjusted, factors = holm(p_values, total=len(statements)), holm_factors(p_values, total=len(statements))
    found = []
    for number, (statement, estimate) in enumerate(zip(statements, estimates, strict=True)):
        if estimate is None:
            found.append(Verdict(statement, "with missing runs"))
            continue
        word = tests[number][1] if adjusted[number] < LEVEL else "undecided"
        p, without = _test(statement.expect, 0.0, estimate)
        by_margin = word != "undecided" and (without != word or factors[number] * p >= LEVEL)
        quantiles = (1 - LEVEL / 2 / factors[number], _POWER)
        detectable = sum(quantile(each, estimate.freedom) for each in quantiles) * estimate.error
        found.append(Verdict(statement, word, estimate, adjusted[number], detectable, by_margin))
    return found


def _in_panels(claim: Claim, panels: Sequence[str]) -> list[Claim]:
    if claim.panel not in (*panels, ""):
        raise InputError(f"claims: {claim.text}: panel is one of {', '.join(panels)}")
    return [claim] if claim.panel else [claim.model_copy(update={"panel": panel}) for panel in panels]


def _test(expect: str, margin: float, estimate: Estimate) -> tuple[float, str]:
    """The p value of what the contrast tends to, and that word."""
    mean = -estimate.mean if expect.endswith("less") else estimate.mean
    if expect == "equal":
        support = max(p_above(mean + margin, estimate), p_above(margin - mean, estimate))
        against = p_above(abs(mean) - margin, estimate)
    elif expect.startswith("not"):
        support, against = p_above(margin - mean, estimate), p_above(mean - margin, estimate)
    else:
        support, against = p_above(mean, estimate), p_above(margin - mean, estimate)
        if support < LEVEL / 2 and against < LEVEL / 2:  # above 0, and by so little that it counts as equal
            support = 1.0
    p, word = min((support, "supported"), (against, "contradicted"))
    return min(1.0, 2 * p), word


def _estimate(claim: Claim, results: Sequence[Result], study: Study) -> Estimate | None:
    """The contrast's mean over seeds; None while runs are missing, or too few for an error."""
    sides = [_values(place, claim, results, study) for place in claim.places]
    known = [side for side in sides if side is not None]
    if len(known) < len(sides):
        return None
    name = claim.y or study.figure.y[0]
    if name not in MEASURED:
        return exact(next(iter(known[0].values())) - (next(iter(known[1].values())) if known[1:] else 0.0))
    if claim.slope is not None:
        return paired_estimate(list(known[0].values()))
    left, right = known
    seeds = [seed for seed in left if seed in right]
    if len(seeds) >= 2:
        left, right = ({seed: side[seed] for seed in seeds} for side in known)
        largest = 100.0 if name == "error" else max(map(abs, (*left.values(), *right.values())))  # error: 100 - top-1
        estimate = paired_estimate([left[seed] - right[seed] for seed in seeds], _ROUNDING * largest)
    else:
        estimate = welch_estimate(list(left.values()), list(right.values()))
    means = (statistics.fmean(left.values()), statistics.fmean(right.values()))
    return estimate and replace(estimate, sides=means)


def _values(place: Place, claim: Claim, results: Sequence[Result], study: Study) -> dict[int, float] | None:
    """The mean, or slope, over a place's points for each seed; None while runs are missing or where one diverged."""
    name = claim.y or study.figure.y[0]
    by_seed: dict[int, list[tuple[float, float]]] = {}
    for result in filter(lambda result: _is_at(place, result), results):
        value = result.y.get(name, math.nan)
        if math.isnan(value):
            return None
        x = float(result.x) if claim.slope is not None and is_number(result.x) else 0.0
        by_seed.setdefault(result.study_run.recipe.train.seed, []).append((x, value))
    if claim.slope is None:
        return {seed: statistics.fmean(y for _, y in points) for seed, points in by_seed.items()}
    return {seed: _slope(points, claim, study.figure.log_x) for seed, points in by_seed.items()}


def _slope(points: Sequence[tuple[float, float]], claim: Claim, log: bool) -> float:
    x = [math.log10(at) if log else at for at, _ in points]
    if len(set(x)) < 2:
        raise InputError(f"claims: {claim.text}: a slope takes points at two or more x, numbers")
    return statistics.linear_regression(x, [y for _, y in points]).slope


def _is_at(place: Place, result: Result) -> bool:
    run = result.study_run
    return run.line == place.line and all(
        value_of(name, run.recipe) == as_quantity(value) for name, value in place.at.items()
    )
