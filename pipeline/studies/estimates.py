"""A contrast of results over seeds: its mean, error and interval, and the p values of one and of many."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.05


@dataclass(frozen=True)
class Estimate:
    """Mean of a contrast, its standard error and the degrees of freedom, from `count` seeds of each side.

    exact: it was computed and has no error. sides: the means of both, where they are known.
    """

    mean: float
    error: float
    freedom: float
    count: int
    paired: bool
    sides: tuple[float, float] | None = None

    @property
    def exact(self) -> bool:
        """Whether nothing was random."""
        return self.count == 0

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, of this contrast alone."""
        half = quantile(1 - LEVEL / 2, self.freedom) * self.error
        return (self.mean - half, self.mean + half)


def paired_estimate(values: Sequence[float], rounding: float = 0.0) -> Estimate | None:
    """Student's, of the differences of pairs; those as near to each other as `rounding` are the same. None of one."""
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
        return paired_estimate([one - other for one, other in zip(left, right, strict=True)])
    if min(len(left), len(right)) >= 2:
        return welch_estimate(left, right)
    if len(left) == len(right) == 1:
        return exact(left[0] - right[0])
    sign, one, many = (1, right[0], left) if len(right) == 1 else (-1, left[0], right)
    return paired_estimate([sign * (value - one) for value in many])


def welch_estimate(left: Sequence[float], right: Sequence[float]) -> Estimate | None:
    """Welch's, of independent samples; None where a side has one."""
    if min(len(left), len(right)) < 2:
        return None
    parts = [statistics.variance(side) / len(side) for side in (left, right)]
    error = math.sqrt(sum(parts))
    bottom = sum(part**2 / (len(side) - 1) for part, side in zip(parts, (left, right), strict=True))
    freedom = error**4 / bottom if bottom else len(left) + len(right) - 2
    mean = statistics.fmean(left) - statistics.fmean(right)
    return Estimate(mean, error, freedom, min(len(left), len(right)), paired=False)


def p_above(value: float, estimate: Estimate) -> float:
    """The one-sided p value of a mean above 0."""
    from scipy import stats

    if estimate.error == 0:
        least = 0.0 if estimate.exact else 0.5**estimate.count
        return least if value > 0 else 1.0
    return float(stats.t.sf(value / estimate.error, estimate.freedom))


def quantile(probability: float, freedom: float) -> float:
    """Return a quantile of Student's t."""
    from scipy import stats

    return float(stats.t.ppf(probability, freedom))


def holm(p_values: dict[int, float], total: int) -> dict[int, float]:
    """Holm's adjusted p values, of `total` tests of which some may not have been made yet."""
    adjusted, greatest = {}, 0.0
    for number, factor in holm_factors(p_values, total).items():
        greatest = max(greatest, min(1.0, factor * p_values[number]))
        adjusted[number] = greatest
    return adjusted


def holm_factors(p_values: dict[int, float], total: int) -> dict[int, int]:
    """Return the factor by which Holm multiplies each p value, the least first."""
    return {number: total - rank for rank, number in enumerate(sorted(p_values, key=p_values.__getitem__))}
