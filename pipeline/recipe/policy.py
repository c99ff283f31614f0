"""Parses timm's policy strings (1.0.31) without importing timm, and `cifar10`, which timm does not have.

RandAugment (Cubuk et al. 2020), AutoAugment (Cubuk et al. 2019) and AugMix (Hendrycks et al. 2020). Stricter than
timm, which silently ignores an option without a number and an unknown set of operations.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from widemix.errors import InputError, shown


@dataclass(frozen=True)
class Step:
    """An operation by timm's name, applied with probability `prob`, with a magnitude on timm's scale of 0 to 10.

    The magnitude is sampled from N(magnitude, std), or uniformly from [0, magnitude] where std is infinite, and
    clipped to [0, limit].
    """

    name: str
    prob: float
    magnitude: float
    std: float = 0.0
    limit: float = 10.0


@dataclass(frozen=True)
class RandAugment:
    """`layers` of the steps one after the other: sampled uniformly with replacement, or by weight without."""

    steps: tuple[Step, ...]
    layers: int
    weights: tuple[float, ...] | None


@dataclass(frozen=True)
class AutoAugment:
    """All steps of one of the policies, sampled uniformly."""

    policies: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True)
class AugMix:
    """`width` chains of `depth` steps (0: one to three), mixed by Dirichlet(alpha), with the image by Beta."""

    steps: tuple[Step, ...]
    width: int
    depth: int
    alpha: float
    blended: bool


Policy = RandAugment | AutoAugment | AugMix


@dataclass(frozen=True)
class _Option:
    """A number in a policy string: its type, default and range."""

    kind: type
    default: float
    least: float
    greatest: float


_RAND = {
    "m": _Option(int, 10, 0, 30),
    "n": _Option(int, 2, 1, 100),
    "p": _Option(float, 0.5, 0, 1),
    "mstd": _Option(float, 0, 0, 1000),
    "mmax": _Option(int, 10, 1, 1000),
    "inc": _Option(int, 0, 0, 1),
}
_AUTO = {"mstd": _Option(float, 0, 0, 1000)}
_MIX = {
    "m": _Option(int, 3, 0, 30),
    "w": _Option(int, 3, 1, 16),
    "d": _Option(int, 0, 0, 16),
    "a": _Option(float, 1, 0.05, 1000),
    "b": _Option(int, 0, 0, 1),
    "mstd": _Option(float, math.inf, 0, 1000),
}

_MOVES = ("ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
_ENHANCEMENTS = ("Color", "Contrast", "Brightness", "Sharpness")
_FIXED = ("AutoContrast", "Equalize", "Invert", "Rotate")
_PLAIN = (*_FIXED, "Posterize", "Solarize", "SolarizeAdd", *_ENHANCEMENTS, *_MOVES)
_STRONGER = tuple(f"{name}Increasing" for name in _ENHANCEMENTS)
_INCREASING = (*_FIXED, "PosterizeIncreasing", "SolarizeIncreasing", "SolarizeAdd", *_STRONGER, *_MOVES)
_MIXED = (
    *("AutoContrast", *_STRONGER, "Equalize", "Rotate", "PosterizeIncreasing", "SolarizeIncreasing"),
    *_MOVES,
)
_W0 = {  # timm's first weights (`w0`, up to 0.8), for the operations of `inc0` or `inc1` alike
    **dict.fromkeys(("ShearX", "ShearY"), 40),
    **dict.fromkeys(("TranslateXRel", "TranslateYRel"), 20),
    **dict.fromkeys(("Color", "Sharpness", "AutoContrast"), 5),
    **dict.fromkeys(("Solarize", "SolarizeAdd", "Contrast", "Brightness", "Equalize"), 1),
    "Rotate": 60,
}
_SETS: dict[str, Mapping[str, float] | tuple[str, ...]] = {
    "weights": {
        "Rotate": 3,
        "ShearX": 2,
        "ShearY": 2,
        "TranslateXRel": 1,
        "TranslateYRel": 1,
        **dict.fromkeys(("ColorIncreasing", "SharpnessIncreasing", "AutoContrast"), 0.25),
        **dict.fromkeys(("SolarizeIncreasing", "SolarizeAdd", "ContrastIncreasing", "BrightnessIncreasing"), 0.05),
        **dict.fromkeys(("Equalize", "PosterizeIncreasing", "Invert"), 0.05),
    },
    "3a": ("SolarizeIncreasing", "Desaturate", "GaussianBlur"),
    "3aw": {
        **dict.fromkeys(("SolarizeIncreasing", "Desaturate", "GaussianBlur"), 6),
        "Rotate": 3,
        "ShearX": 2,
        "ShearY": 2,
        "PosterizeIncreasing": 1,
        "AutoContrast": 1,
        **dict.fromkeys(("ColorIncreasing", "SharpnessIncreasing", "ContrastIncreasing", "BrightnessIncreasing"), 1),
        "Equalize": 1,
        "Invert": 1,
    },
}
OWN_SETS: dict[str, tuple[str, ...]] = {}  # of `add_to_sets`

# name, probability, magnitude; two steps a policy. `r` policies keep fewer bits as the magnitude rises.
_V0 = """
Equalize .8 1, ShearY .8 4; Color .4 9, Equalize .6 3; Color .4 1, Rotate .6 8; Solarize .8 3, Equalize .4 7;
Solarize .4 2, Solarize .6 2; Color .2 0, Equalize .8 8; Equalize .4 8, SolarizeAdd .8 3; ShearX .2 9, Rotate .6 8;
Color .6 1, Equalize 1 2; Invert .4 9, Rotate .6 0; Equalize 1 9, ShearY .6 3; Color .4 7, Equalize .6 0;
Posterize .4 6, AutoContrast .4 7; Solarize .6 8, Color .6 9; Solarize .2 4, Rotate .8 9;
Rotate 1 7, TranslateYRel .8 9; ShearX 0 0, Solarize .8 4; ShearY .8 0, Color .6 4; Color 1 0, Rotate .6 2;
Equalize .8 4, Equalize 0 8; Equalize 1 4, AutoContrast .6 2; ShearY .4 7, SolarizeAdd .6 7;
Posterize .8 2, Solarize .6 10; Solarize .6 8, Equalize .6 1; Color .8 6, Rotate .4 5
"""
_ORIGINAL = """
PosterizeOriginal .4 8, Rotate .6 9; Solarize .6 5, AutoContrast .6 5; Equalize .8 8, Equalize .6 3;
PosterizeOriginal .6 7, PosterizeOriginal .6 6; Equalize .4 7, Solarize .2 4; Equalize .4 4, Rotate .8 8;
Solarize .6 3, Equalize .6 7; PosterizeOriginal .8 5, Equalize 1 2; Rotate .2 3, Solarize .6 8;
Equalize .6 8, PosterizeOriginal .4 6; Rotate .8 8, Color .4 0; Rotate .4 9, Equalize .6 2;
Equalize 0 7, Equalize .8 8; Invert .6 4, Equalize 1 8; Color .6 4, Contrast 1 8; Rotate .8 8, Color 1 2;
Color .8 8, Solarize .8 7; Sharpness .4 7, Invert .6 8; ShearX .6 5, Equalize 1 9; Color .4 0, Equalize .6 3;
Equalize .4 7, Solarize .2 4; Solarize .6 5, AutoContrast .6 5; Invert .6 4, Equalize 1 8; Color .6 4, Contrast 1 8;
Equalize .8 8, Equalize .6 3
"""
# Cubuk et al. 2019, appendix: the policy found on CIFAR-10. timm does not have it. As in the code that its authors
# released, a larger magnitude leaves fewer bits and a lower threshold.
_CIFAR10 = """
Invert .1 0, Contrast .2 6; Rotate .7 2, TranslateXRel .3 9; Sharpness .8 1, Sharpness .9 3;
ShearY .5 8, TranslateYRel .7 9; AutoContrast .5 0, Equalize .9 0; ShearY .2 7, PosterizeIncreasing .3 7;
Color .4 3, Brightness .6 7; Sharpness .3 9, Brightness .7 9; Equalize .6 0, Equalize .5 0;
Contrast .6 7, Sharpness .6 5; Color .7 7, TranslateXRel .5 8; Equalize .3 0, AutoContrast .4 0;
TranslateYRel .4 3, Sharpness .2 6; Brightness .9 6, Color .2 8; SolarizeIncreasing .5 2, Invert 0 0;
Equalize .2 0, AutoContrast .6 0; Equalize .2 0, Equalize .6 0; Color .9 9, Equalize .6 0;
AutoContrast .8 0, SolarizeIncreasing .2 8; Brightness .1 3, Color .7 0; SolarizeIncreasing .4 5, AutoContrast .9 0;
TranslateYRel .9 9, TranslateYRel .7 9; AutoContrast .9 0, SolarizeIncreasing .8 3; Equalize .8 0, Invert .1 0;
TranslateYRel .7 9, AutoContrast .9 0
"""
_LEARNT = {
    "v0": _V0,
    "v0r": _V0.replace("Posterize ", "PosterizeIncreasing "),
    "original": _ORIGINAL,
    "originalr": _ORIGINAL.replace("PosterizeOriginal", "PosterizeIncreasing"),
    "cifar10": _CIFAR10,
    "3a": "Solarize 1 5; Desaturate 1 10; GaussianBlurRand 1 10",  # Touvron et al. 2022
}


def parse_policy(text: str) -> Policy:
    """A policy such as `rand-m9-mstd0.5-inc1`; `InputError` names the wrong part and what would be right.

    The options, with their defaults:
    rand: m magnitude (10), n layers (2), p probability of each (0.5), mstd (0; above 100: uniform from 0 to m), mmax
    (10), inc (0), t set of operations (weights, 3a, 3aw, or one of `add_to_sets`), w0 the weights of timm before 0.9.
    v0, v0r, original, originalr (found on ImageNet), cifar10, 3a: mstd (0).
    augmix: m (3), w chains (3), d steps in a chain (0: one to three), a alpha (1), b successive blends (0), mstd
    (uniform).
    """
    name, *parts = text.split("-")
    if name == "rand":
        return _rand(parts)
    if name == "augmix":
        return _mix(parts)
    if name in _LEARNT:
        std = _options(parts, _AUTO)["mstd"]
        policies = (chain.split(",") for chain in _LEARNT[name].split(";"))
        return AutoAugment(tuple(tuple(_step(step, std) for step in chain) for chain in policies))
    raise InputError(f"{name!r}: no such policy; known are rand, augmix, {', '.join(_LEARNT)}")


def add_to_sets(operation: str, sets: Sequence[str]) -> None:
    """Add an operation to sets of names of its own, so that `rand-t<set>` is a valid policy; `ValueError` for timm's.

    Operations of a set are sampled uniformly, with replacement.
    """
    for name in sets:
        if name in _SETS:
            raise ValueError(f"operation set {name!r}: is timm's; choose another name")
        if not name or "-" in name:
            raise ValueError(f"operation set {name!r}: needs a name without '-'")
    for name in sets:
        OWN_SETS[name] = (*OWN_SETS.get(name, ()), operation)


def _rand(parts: list[str]) -> RandAugment:
    sets = [part for part in parts if part.startswith(("t", "w"))]
    options = _options([part for part in parts if part not in sets], _RAND)
    names = _INCREASING if options["inc"] else _PLAIN
    chosen: Mapping[str, float] | tuple[str, ...] = names
    if sets:
        known = {f"t{name}": chosen for name, chosen in (_SETS | OWN_SETS).items()}
        known["w0"] = {name: _W0[plain] for name, plain in zip(names, _PLAIN, strict=True) if plain in _W0}
        if len(sets) > 1 or sets[0] not in known:
            raise InputError(f"part {'-'.join(sets)!r}: takes one set of operations, of {', '.join(known)}")
        chosen = known[sets[0]]
    std = math.inf if options["mstd"] > 100 else options["mstd"]
    steps = tuple(Step(name, options["p"], options["m"], std, options["mmax"]) for name in chosen)
    weights = tuple(chosen.values()) if isinstance(chosen, Mapping) else None
    if weights and options["n"] > len(weights):
        raise InputError(
            f"part 'n{options['n']}': {sets[0]} samples without replacement from {len(weights)} operations"
        )
    return RandAugment(steps, options["n"], weights)


def _mix(parts: list[str]) -> AugMix:
    options = _options(parts, _MIX)
    steps = tuple(Step(name, 1.0, options["m"], options["mstd"]) for name in _MIXED)
    return AugMix(steps, options["w"], options["d"], options["a"], bool(options["b"]))


def _step(text: str, std: float) -> Step:
    name, prob, magnitude = text.split()
    return Step(name, float(prob), float(magnitude), std)


def _options(parts: list[str], known: dict[str, _Option]) -> dict[str, Any]:
    """The options' numbers, with the defaults of those that are not given."""
    values: dict[str, Any] = {}
    for part in parts:
        key, number = re.fullmatch(r"(\D*)(.*)", part, re.DOTALL).groups()  # type: ignore[union-attr]
        if key not in known:
            names = [*known, "t", "w0"] if known is _RAND else known
            raise InputError(f"part {part!r}: no such option; known are {', '.join(names)}")
        if key in values:
            raise InputError(f"part {part!r}: {key} is given twice")
        values[key] = _number(part, number, known[key])
    return {key: option.default for key, option in known.items()} | values


def _number(part: str, text: str, option: _Option) -> float:
    if not re.fullmatch("[0-9]+" if option.kind is int else r"[0-9]+(\.[0-9]*)?", text):
        whole = "whole " if option.kind is int else ""
        raise InputError(f"part {part!r}: needs a {whole}number such as {part[: len(part) - len(text)]}1")
    value = float(text)
    if not option.least <= value <= option.greatest:
        raise InputError(f"part {shown(part)}: must be {option.least:g} to {option.greatest:g}")
    return option.kind(value)
