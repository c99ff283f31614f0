"""Classes of unequal size: how unequal they are, and the weights of `data.sampling` and `train.class_weights`."""

import difflib
import math
from collections.abc import Mapping, Sequence

from widemix.errors import InputError

UNEQUAL, SUGGESTED = 2, 10  # from which `imbalance` on it is printed, and a key suggested
_BETA = 0.999  # of the effective number of samples

# The weight of a sample, by the number of samples of its class.
RULES = {
    "balanced": lambda count: 1 / count,
    "inverse": lambda count: 1 / count,
    "sqrt": lambda count: 1 / math.sqrt(count),
    "effective": lambda count: (1 - _BETA) / (1 - _BETA**count),  # Cui et al. 2019, equation 6
}


def class_weights(
    key: str, rule: str | Mapping[str, float], counts: Sequence[int], names: Sequence[str]
) -> list[float]:
    """Return the weight of a sample of each class; 0 for a class without samples.

    key: for errors. rule: one of `RULES`, whose weights have a mean of 1 over the samples; or weights by the names of
    classes, those of others being 1.

    `InputError` if there is no class of such a name, or no sample has a weight.
    """
    if isinstance(rule, str):
        weights = [RULES[rule](count) if count else 0.0 for count in counts]
        mean = sum(weight * count for weight, count in zip(weights, counts, strict=True)) / sum(counts)
        return [weight / mean for weight in weights]
    for name in rule:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            cure = f"did you mean {close[0]!r}?" if close else f"the first are {', '.join(names[:3])}"
            raise InputError(f"{key}: the prepared folder has no class {name!r}; {cure}")
    weights = [rule.get(name, 1.0) if count else 0.0 for name, count in zip(names, counts, strict=True)]
    if not any(weights):
        raise InputError(f"{key}: gives no class that has samples a weight above 0")
    return weights


def describe_counts(counts: Sequence[int], names: Sequence[str]) -> str:
    """Return the smallest and the largest class with their samples, and the ratio: "10 of e to 120 of a (1 : 12)"."""
    (least, rare), *_, (most, common) = sorted(zip(counts, names, strict=True), key=lambda each: each[0])
    ratio = f" (1 : {most / least:.3g})" if least else ""
    return f"{least} of {rare} to {most} of {common}{ratio}"


def imbalance(counts: Sequence[int]) -> float:
    """Return how many times the samples of the smallest class the largest has, of classes that have some."""
    present = [count for count in counts if count]
    return max(present) / min(present) if present else 1.0
