"""A policy as numbers; and what it does to an image, sampled from the image's random stream by timm's distributions.

The k-th step takes its random numbers from counter 8 k on, one for each purpose, so that they are independent.
"""

import math
from typing import NamedTuple

import numpy as np

from widemix.data.augment import registry as op
from widemix.data.augment.registry import find_operation
from widemix.data.compiled import jit
from widemix.data.random import scramble, uniform
from widemix.recipe.policy import AugMix, AutoAugment, Policy, RandAugment, Step

NO_POLICY, RAND, AUTO, MIX = range(4)
CUBIC = {
    "bilinear": 0.0,
    "bicubic": 1.0,
    "random": 0.5,
}  # probability of the bicubic filter, sampled for each operation


class Program(NamedTuple):
    """A policy for compiled code."""

    kind: int
    table: np.ndarray  # float64 [steps, 10]: operation, kind, scale, offset, low, high, prob, magnitude, std, limit
    weights: np.ndarray  # float64 [steps], or [0] for a uniform choice
    layers: int  # steps for an image, or in a chain of AugMix; 0: one to three at random
    width: int  # chains of AugMix, else 1
    alpha: float
    blended: bool
    fill: int  # R | G << 8 | B << 16 of pixels from outside of the image
    cubic: float  # probability that an operation which moves pixels interpolates bicubically, and not bilinearly


def compile_policy(policy: Policy | None, mean: tuple[float, float, float], interpolation: str = "random") -> Program:
    """The policy as numbers, with timm's fill colour: `mean`, which is on a scale of 0 to 1.

    Operations that move pixels interpolate as `data.interpolation` says, as in timm; `random` samples for each of
    them. `InputError` where a step's operation is not registered.
    """
    red, green, blue = (min(255, round(255 * channel)) for channel in mean)
    fill, cubic, none = red | green << 8 | blue << 16, CUBIC[interpolation], np.empty(0)
    match policy:
        case RandAugment(steps, layers, weights):
            return Program(RAND, _table(steps), np.array(weights or ()), layers, 1, 0.0, False, fill, cubic)
        case AutoAugment(policies):
            steps = tuple(step for chain in policies for step in chain)
            return Program(AUTO, _table(steps), none, len(policies[0]), 1, 0.0, False, fill, cubic)
        case AugMix(steps, width, depth, alpha, blended):
            return Program(MIX, _table(steps, reach=0.3), none, depth, width, alpha, blended, fill, cubic)
    return Program(NO_POLICY, np.empty((0, 10)), none, 0, 0, 0.0, False, fill, cubic)


def _table(steps: tuple[Step, ...], reach: float = 0.45) -> np.ndarray:
    """`Program.table`: a row for each step; translations go up to `reach` of the side."""
    rows = []
    for step in steps:
        operation, magnitude_map = find_operation(step.name)
        if math.isnan(magnitude_map.scale):
            magnitude_map = magnitude_map._replace(scale=reach)
        rows.append([operation.number, *magnitude_map, step.prob, step.magnitude, step.std, step.limit])
    return np.array(rows, np.float64)


_CHOICE, _PROB, _RADIUS, _ANGLE, _SIGN, _CUBIC, _WITHIN = range(7)
_NUMBERS = 8  # counters of a step
_WEIGHTS, _CHAINS = 1 << 20, 1 << 21  # first counters of AugMix's weights, and of its chains' own streams


@jit
def sample_chain(program, stream, chain):
    """Sample steps into `chain`, float64 [layers, 3]: of each operation (or SKIP), argument, and whether bicubic."""
    table = program.table
    if program.kind == AUTO:
        policy = int(uniform(stream, _CHOICE) * (len(table) // program.layers))
    for k in range(len(chain)):
        at = _NUMBERS * k
        if program.kind == AUTO:
            row = policy * program.layers + k
        elif len(program.weights):
            row = _weighted(program.weights, stream, k)
        else:
            row = int(uniform(stream, at + _CHOICE) * len(table))
        _sample_step(table[row], program.cubic, stream, at, chain[k])


@jit
def _weighted(weights, stream, k):
    """The k-th row of a weighted sample without replacement."""
    left = weights.copy()
    row = 0
    for step in range(k + 1):
        point = uniform(stream, _NUMBERS * step + _CHOICE) * left.sum()
        for candidate in range(len(left)):
            if left[candidate] > 0:
                row = candidate
                point -= left[candidate]
                if point < 0:
                    break
        if step < k:
            left[row] = 0.0
    return row


@jit
def _sample_step(row, cubic, stream, at, step):
    prob, magnitude, std, limit = row[6], row[7], row[8], row[9]
    step[0] = row[0] if uniform(stream, at + _PROB) < prob or prob >= 1 else op.SKIP
    if std == np.inf:
        magnitude *= uniform(stream, at + _RADIUS)
    elif std > 0:
        magnitude += std * _normal(stream, at)
    fraction = max(0.0, min(magnitude, limit)) / 10.0
    step[1] = sample_argument(row, fraction, stream, at)
    step[2] = uniform(stream, at + _CUBIC) < cubic


@jit
def _normal(stream, at):
    radius = math.sqrt(-2.0 * math.log(1.0 - uniform(stream, at + _RADIUS)))
    return radius * math.cos(2.0 * math.pi * uniform(stream, at + _ANGLE))


@jit
def sample_argument(row, fraction, stream, at):
    """The argument of an operation, by `row` of `Program.table`; `fraction` is the magnitude over 10.

    Random numbers come from counter `at` of the stream on. `widemix.data.augment.registry` lists the maps.
    """
    kind, scale, offset, low, high = row[1], row[2], row[3], row[4], row[5]
    amount = fraction * scale
    negative = uniform(stream, at + _SIGN) < 0.5
    if kind == op.LINEAR:
        return max(low, min(high, amount + offset))
    if kind == op.SIGNED:
        return -amount if negative else amount
    if kind == op.AROUND_ONE:
        return max(low, 1.0 - amount if negative else 1.0 + amount)
    if kind == op.RISING:
        return offset + min(high, np.floor(amount))
    if kind == op.FALLING:
        return offset - min(high, np.floor(amount))
    if kind == op.ONE_MINUS:
        return 1.0 - max(low, min(high, amount + offset))
    if kind == op.UNIFORM:
        return offset + (min(fraction, 1.0) * scale - offset) * uniform(stream, at + _WITHIN)
    assert kind == op.NO_ARGUMENT
    return 0.0


@jit
def sample_chain_weights(program, stream, weights):
    """AugMix: sample the chains' weights into float32 [width]; returns the weight of their sum against the image."""
    total = 0.0
    gammas = np.empty(program.width)
    for k in range(program.width):
        gammas[k] = _gamma(program.alpha, scramble(stream + np.uint64(_WEIGHTS + k)))
        total += gammas[k]
    for k in range(program.width):
        weights[k] = gammas[k] / total
    one = _gamma(program.alpha, scramble(stream + np.uint64(_WEIGHTS + program.width)))
    other = _gamma(program.alpha, scramble(stream + np.uint64(_WEIGHTS + program.width + 1)))
    return np.float32(one / (one + other))


@jit
def mixed_chain(program, stream, k):
    """AugMix: the random stream of the k-th chain, and its number of steps."""
    own = scramble(stream + np.uint64(_CHAINS + k))
    depth = program.layers if program.layers else 1 + int(3 * uniform(own, 1 << 19))
    return own, depth


@jit
def _gamma(alpha, stream):
    """A Gamma(alpha, 1) random number (Marsaglia & Tsang 2000)."""
    boosted = alpha if alpha >= 1 else alpha + 1.0
    d = boosted - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    at = 0
    while True:
        normal = _normal(stream, at)
        v = (1.0 + c * normal) ** 3
        if v > 0 and math.log(1.0 - uniform(stream, at)) < 0.5 * normal * normal + d - d * v + d * math.log(v):
            break
        at += _NUMBERS
    scaled = d * v
    return scaled if alpha >= 1 else scaled * (1.0 - uniform(stream, 1 << 19)) ** (1.0 / alpha)
