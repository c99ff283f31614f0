"""What the runs say of a study's claims: difference, interval, and one of three words.

A claim compares a contrast with 0: a difference of two means over points, or a slope. It has a value for each seed,
as the runs of a seed share the order of the data, its augmentation and their start; the mean of these is compared by
Student's t (paired). Where no two seeds are shared, each side has values of its own seeds (Welch). With a margin d
that counts as equal,

    greater   is supported where the contrast is significantly above 0, and contradicted where it is below d;
    less      is the same with the sign turned;
    equal     is supported where the contrast is between -d and d (two one-sided tests), and contradicted where it is
              beyond them.

Where all seeds have the same difference, as of a few images of a small split, nothing says how far others would be:
p is then that of their signs, 2^(1-n) for n seeds.

A claim none of whose points reaches a linear baseline is decided by nothing: networks that do not beat logistic
regression show nothing of networks.

Significant means two-sided p below 0.05 after Holm's correction over the claims of a study. All else is undecided.
Intervals are those of each claim alone.
"""

import math
import statistics
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from widemix.errors import InputError
from widemix.studies.protocol import Claim, Place, Statement
from widemix.studies.quantity import MEASURED, as_quantity, is_number, value_of
from widemix.studies.results import Result
from widemix.studies.study import Study

_LEVEL, _POWER = 0.05, 0.8
_ROUNDING = 2e-5  # of the values, which rows have with six digits: how far apart differences are that are the same


@dataclass(frozen=True)
class Estimate:
    """Mean of a contrast, its standard error and the degrees of freedom, from `count` seeds of each side.

    exact: it was computed and has no error.
    """

    mean: float
    error: float
    freedom: float
    count: int
    paired: bool

    @property
    def exact(self) -> bool:
        """Whether nothing was random."""
        return self.count == 0


@dataclass(frozen=True)
class Verdict:
    """What a claim's runs say. interval: 95 %, of this claim alone. p: Holm's, over all claims of the study.

    detectable: how far beyond the border of the claim, 0 or its margin, a difference must be for this many seeds to
    find it in 80 % of cases, at the level that Holm's correction leaves to this claim.
    word: supported, contradicted, undecided; or with missing runs, with a diverged run or below a linear baseline,
    with nan for all numbers.
    """

    claim: Statement
    word: str
    estimate: Estimate | None = None
    interval: tuple[float, float] = (math.nan, math.nan)
    p: float = math.nan
    detectable: float = math.nan


def verdicts(results: Sequence[Result], study: Study, below: Set[tuple] = frozenset()) -> list[Verdict]:
    """What the results say of each claim of the study, of one without a panel in each panel by itself.

    below: the points that are below a linear baseline. Raises `InputError` for a claim about no point of the figure.
    """
    panels = list(dict.fromkeys(result.study_run.panel for result in results))
    claims = [each for claim in study.claims for each in _in_panels(claim, panels)]
    reasons = [_no_verdict([each for each in results if _is_of(claim, each)], below) for claim in claims]
    estimates = [
        None if reason else _estimate(claim, results, study) for claim, reason in zip(claims, reasons, strict=True)
    ]
    return [
        replace(verdict, word=reason) if reason else verdict
        for verdict, reason in zip(decide(claims, estimates), reasons, strict=True)
    ]


def _no_verdict(own: Sequence[Result], below: Set[tuple]) -> str:
    """Why the runs of a claim decide nothing; empty where they may."""
    if own and all(result.study_run.point in below for result in own):
        return "below a linear baseline"
    return "with a diverged run" if any(result.diverged for result in own) else ""


def decide(statements: Sequence[Statement], estimates: Sequence[Estimate | None]) -> list[Verdict]:
    """What the estimates say of each statement, as one family; None: its runs are missing."""
    tests = {n: _test(statements[n], estimate) for n, estimate in enumerate(estimates) if estimate is not None}
    p_values = {number: p for number, (p, _) in tests.items()}
    adjusted, factors = holm(p_values, total=len(statements)), _factors(p_values, total=len(statements))
    found = []
    for number, (statement, estimate) in enumerate(zip(statements, estimates, strict=True)):
        if estimate is None:
            found.append(Verdict(statement, "with missing runs"))
            continue
        word = tests[number][1] if adjusted[number] < _LEVEL else "undecided"
        half = _quantile(1 - _LEVEL / 2, estimate.freedom) * estimate.error
        interval = (estimate.mean - half, estimate.mean + half)
        quantiles = (1 - _LEVEL / 2 / factors[number], _POWER)
        detectable = sum(_quantile(each, estimate.freedom) for each in quantiles) * estimate.error
        found.append(Verdict(statement, word, estimate, interval, adjusted[number], detectable))
    return found


def _in_panels(claim: Claim, panels: Sequence[str]) -> list[Claim]:
    if claim.panel not in (*panels, ""):
        raise InputError(f"claims: {claim.text}: panel is one of {', '.join(panels)}")
    return [claim] if claim.panel else [claim.model_copy(update={"panel": panel}) for panel in panels]


def holm(p_values: dict[int, float], total: int) -> dict[int, float]:
    """Holm's adjusted p values, of `total` tests of which some may not have been made yet."""
    adjusted, greatest = {}, 0.0
    for number, factor in _factors(p_values, total).items():
        greatest = max(greatest, min(1.0, factor * p_values[number]))
        adjusted[number] = greatest
    return adjusted


def _factors(p_values: dict[int, float], total: int) -> dict[int, int]:
    """What Holm multiplies each p value by, of the least one first."""
    return {number: total - rank for rank, number in enumerate(sorted(p_values, key=p_values.__getitem__))}


def _test(claim: Statement, estimate: Estimate) -> tuple[float, str]:
    """The p value of what the contrast tends to, and that word."""
    sign = -1 if claim.expect == "less" else 1
    mean, margin = sign * estimate.mean, claim.margin
    if claim.expect == "equal":
        support = max(_above(mean + margin, estimate), _above(margin - mean, estimate))
        against = _above(abs(mean) - margin, estimate)
    else:
        support, against = _above(mean, estimate), _above(margin - mean, estimate)
        if support < _LEVEL / 2 and against < _LEVEL / 2:  # above 0, and by so little that it counts as equal
            support = 1.0
    p, word = min((support, "supported"), (against, "contradicted"))
    return min(1.0, 2 * p), word


def _above(value: float, estimate: Estimate) -> float:
    """The one-sided p value of a mean above 0."""
    from scipy import stats

    if estimate.error == 0:
        least = 0.0 if estimate.exact else 0.5**estimate.count
        return least if value > 0 else 1.0
    return float(stats.t.sf(value / estimate.error, estimate.freedom))


def _quantile(probability: float, freedom: float) -> float:
    from scipy import stats

    return float(stats.t.ppf(probability, freedom))


def _estimate(claim: Claim, results: Sequence[Result], study: Study) -> Estimate | None:
    """The contrast's mean over seeds; None while runs are missing, or too few for an error."""
    own = [result for result in results if result.study_run.panel == claim.panel]
    sides = [_values(place, claim, own, study) for place in claim.places]
    known = [side for side in sides if side is not None]
    if len(known) < len(sides):
        return None
    name = claim.y or study.figure.y[0]
    if name not in MEASURED:
        return exact(next(iter(known[0].values())) - (next(iter(known[1].values())) if known[1:] else 0.0))
    if claim.slope is not None:
        return _paired(list(known[0].values()))
    left, right = known
    both = [left[seed] - right[seed] for seed in left if seed in right]
    if len(both) >= 2:
        largest = 100.0 if name == "error" else max(map(abs, (*left.values(), *right.values())))  # error: 100 - top-1
        return _paired(both, _ROUNDING * largest)
    return _welch(list(left.values()), list(right.values()))


def _paired(values: Sequence[float], rounding: float = 0.0) -> Estimate | None:
    if len(values) < 2:
        return None
    same = max(values) - min(values) <= rounding
    error = 0.0 if same else statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(statistics.fmean(values), error, len(values) - 1, len(values), paired=True)


def exact(value: float) -> Estimate:
    """A contrast that is known without an error."""
    return Estimate(value, 0.0, math.inf, 0, paired=True)


def samples_differ(left: Sequence[float], right: Sequence[float], paired: bool) -> Estimate | None:
    """The difference of two means, each of samples or, of one number, exact. Samples are independent, or in pairs."""
    if paired:
        return _paired([one - other for one, other in zip(left, right, strict=True)])
    if min(len(left), len(right)) >= 2:
        return _welch(left, right)
    if len(left) == len(right) == 1:
        return exact(left[0] - right[0])
    sign, one, many = (1, right[0], left) if len(right) == 1 else (-1, left[0], right)
    return _paired([sign * (value - one) for value in many])


def _welch(left: Sequence[float], right: Sequence[float]) -> Estimate | None:
    if min(len(left), len(right)) < 2:
        return None
    parts = [statistics.variance(side) / len(side) for side in (left, right)]
    error = math.sqrt(sum(parts))
    bottom = sum(part**2 / (len(side) - 1) for part, side in zip(parts, (left, right), strict=True))
    freedom = error**4 / bottom if bottom else len(left) + len(right) - 2
    mean = statistics.fmean(left) - statistics.fmean(right)
    return Estimate(mean, error, freedom, min(len(left), len(right)), paired=False)


def _values(place: Place, claim: Claim, results: Sequence[Result], study: Study) -> dict[int, float] | None:
    """The mean, or slope, over a place's points for each seed; None while runs are missing or where one diverged."""
    name = claim.y or study.figure.y[0]
    own = [result for result in results if _is_at(place, result)]
    if not own:
        raise InputError(
            f"claims: {claim.text}: no point of the figure has line {place.line} {_where(place)}".rstrip()
        )
    by_seed: dict[int, list[tuple[float, float]]] = {}
    for result in own:
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


def _is_of(claim: Claim, result: Result) -> bool:
    return result.study_run.panel == claim.panel and any(_is_at(place, result) for place in claim.places)


def _is_at(place: Place, result: Result) -> bool:
    run = result.study_run
    return run.line == place.line and all(
        value_of(name, run.recipe) == as_quantity(value) for name, value in place.at.items()
    )


def _where(place: Place) -> str:
    return " and ".join(f"{name} {value}" for name, value in place.at.items())
