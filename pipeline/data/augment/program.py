"""A policy as numbers: what the compiled code samples from."""

import math
from typing import NamedTuple

import numpy as np

from widemix.data.augment.registry import find_operation
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
