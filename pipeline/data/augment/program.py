"""A policy as numbers: what the compiled code draws from."""

from typing import NamedTuple

import numpy as np

from pipeline.data.augment import operations as op
from pipeline.recipe.policy import AugMix, AutoAugment, Policy, RandAugment, Step

NO_POLICY, RAND, AUTO, MIX = range(4)

# How timm makes an operation's argument of the magnitude over 10, m: the `*_level_to_arg` of its auto_augment.py.
NOTHING = 0  # no argument
LINEAR = 1  # offset + scale m, within low and high
SIGNED = 2  # scale m or its negative
AWAY = 3  # 1 + scale m or 1 - scale m, at least low
STEPS = 4  # offset + the whole part of scale m, which is at most high
FEWER = 5  # offset - the same
REST = 6  # 1 - LINEAR
SPREAD = 7  # uniform between offset and scale m (m within 0 and 1)

_INF = np.inf
_ENHANCE, _ENHANCE_AWAY = (LINEAR, 1.8, 0.1, -_INF, _INF), (AWAY, 0.9, 0, 0.1, _INF)
# timm's name: operation, law, scale, offset, low, high. None: see `_table`.
_LAWS: dict[str, tuple] = {
    "AutoContrast": (op.AUTOCONTRAST, NOTHING, 0, 0, 0, 0),
    "Equalize": (op.EQUALIZE, NOTHING, 0, 0, 0, 0),
    "Invert": (op.INVERT, NOTHING, 0, 0, 0, 0),
    "Rotate": (op.ROTATE, SIGNED, 30, 0, 0, 0),
    "Posterize": (op.POSTERIZE, STEPS, 4, 0, 0, _INF),
    "PosterizeIncreasing": (op.POSTERIZE, FEWER, 4, 4, 0, _INF),
    "PosterizeOriginal": (op.POSTERIZE, STEPS, 4, 4, 0, _INF),
    "Solarize": (op.SOLARIZE, STEPS, 256, 0, 0, 256),
    "SolarizeIncreasing": (op.SOLARIZE, FEWER, 256, 256, 0, 256),
    "SolarizeAdd": (op.SOLARIZE_ADD, STEPS, 110, 0, 0, 128),
    "Color": (op.COLOR, *_ENHANCE),
    "Contrast": (op.CONTRAST, *_ENHANCE),
    "Brightness": (op.BRIGHTNESS, *_ENHANCE),
    "Sharpness": (op.SHARPNESS, *_ENHANCE),
    "ColorIncreasing": (op.COLOR, *_ENHANCE_AWAY),
    "ContrastIncreasing": (op.CONTRAST, *_ENHANCE_AWAY),
    "BrightnessIncreasing": (op.BRIGHTNESS, *_ENHANCE_AWAY),
    "SharpnessIncreasing": (op.SHARPNESS, *_ENHANCE_AWAY),
    "ShearX": (op.SHEAR_X, SIGNED, 0.3, 0, 0, 0),
    "ShearY": (op.SHEAR_Y, SIGNED, 0.3, 0, 0, 0),
    "TranslateXRel": (op.TRANSLATE_X_REL, SIGNED, None, 0, 0, 0),
    "TranslateYRel": (op.TRANSLATE_Y_REL, SIGNED, None, 0, 0, 0),
    "Desaturate": (op.COLOR, REST, 0.5, 0.5, 0.5, 1),
    "GaussianBlur": (op.BLUR, LINEAR, 2.0 - 0.1, 0.1, 0.1, 2),
    "GaussianBlurRand": (op.BLUR, SPREAD, 2, 0.1, 0, 0),
}


class Program(NamedTuple):
    """A policy that the compiled code can draw from."""

    kind: int
    table: np.ndarray  # float64 [steps, 10]: operation, law, scale, offset, low, high, prob, magnitude, std, limit
    weights: np.ndarray  # float64 [steps], or [0] for a uniform choice
    layers: int  # steps that a picture or a chain gets; 0 draws one to three
    width: int  # chains, 1 without AugMix
    alpha: float
    blended: bool
    fill: int  # R | G << 8 | B << 16 of what moves in from outside


def compile_policy(policy: Policy | None, mean: tuple[float, float, float]) -> Program:
    """The policy in numbers, with timm's fill: the mean colour, `mean` being on a scale of 0 to 1."""
    red, green, blue = (min(255, round(255 * channel)) for channel in mean)
    fill, none = red | green << 8 | blue << 16, np.empty(0)
    match policy:
        case RandAugment(steps, layers, weights):
            return Program(RAND, _table(steps), np.array(weights or ()), layers, 1, 0.0, False, fill)
        case AutoAugment(policies):
            steps = tuple(step for chain in policies for step in chain)
            return Program(AUTO, _table(steps), none, len(policies[0]), 1, 0.0, False, fill)
        case AugMix(steps, width, depth, alpha, blended):
            return Program(MIX, _table(steps, reach=0.3), none, depth, width, alpha, blended, fill)
    return Program(NO_POLICY, np.empty((0, 10)), none, 0, 0, 0.0, False, fill)


def _table(steps: tuple[Step, ...], reach: float = 0.45) -> np.ndarray:
    """One row a step; translations go up to `reach` of the side."""
    rows = []
    for step in steps:
        law = (reach if number is None else number for number in _LAWS[step.name])
        rows.append([*law, step.prob, step.magnitude, step.std, step.limit])
    return np.array(rows, np.float64)
