"""The operations of augmentation policies: one table, from which compiled policies and the analysis sheet are made.

To add a built-in operation, write its function, give it the next number and an entry in `OPERATIONS`, and call it in
`operations.py`. One of another package is added by `register_operation`. This module needs neither numba nor
torch.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from widemix.arguments import Name, Numbers, check_arguments
from widemix.errors import InputError
from widemix.recipe.policy import add_to_sets

SKIP = -1  # in place of an operation that its probability left out
# Those that change each value by itself come first: see `operations.apply_chain`.
AUTOCONTRAST, EQUALIZE, INVERT, POSTERIZE, SOLARIZE, SOLARIZE_ADD, BRIGHTNESS = range(7)
COLOR, CONTRAST, SHARPNESS, BLUR = range(7, 11)
ROTATE, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, TRANSLATE_X_REL, TRANSLATE_Y_REL = range(11, 18)
FIRST_REGISTERED = 1000  # numbers from here on are those of `register_operation`

# Kinds of `MagnitudeMap`, with m the magnitude over 10: the `*_level_to_arg` functions of timm's auto_augment.py.
NO_ARGUMENT = 0
LINEAR = 1  # offset + scale m, within low and high
SIGNED = 2  # scale m or its negative
AROUND_ONE = 3  # 1 + scale m or 1 - scale m, at least low
RISING = 4  # offset + the whole part of scale m, which is at most high
FALLING = 5  # offset - the whole part of scale m, which is at most high
ONE_MINUS = 6  # 1 - LINEAR
UNIFORM = 7  # uniform between offset and scale m (m within 0 and 1)


class MagnitudeMap(NamedTuple):
    """How an operation's argument follows from the magnitude: a kind from above, and its numbers."""

    kind: int = NO_ARGUMENT
    scale: float = 0.0  # NaN for translations: how far they go depends on the policy
    offset: float = 0.0
    low: float = -math.inf
    high: float = math.inf


Function: TypeAlias = Callable[[np.ndarray, float], object]
"""Of a registered operation: changes an image, uint8 [H, W, 3], in place, given the argument of its magnitude map."""


@dataclass(frozen=True)
class Operation:
    """An operation: its number in compiled code, how its arguments follow from the magnitude, and its sheet's row."""

    number: int
    title: str  # on the sheet
    magnitude_maps: Mapping[str, MagnitudeMap]  # by the names that policies use: timm's, for built-in operations
    shown: Sequence[float] | np.ndarray = ()  # arguments on the sheet; empty: those of the map
    function: Function | None = None  # of a registered operation

    @property
    def peer(self) -> str | None:
        """The function of timm.data.auto_augment that it is compared with; None for a registered one."""
        name = next(iter(self.magnitude_maps))
        return None if self.function else re.sub("(?<!^)(?=[A-Z])", "_", name).lower()

    @property
    def moves(self) -> bool:
        """Whether it moves pixels, and so has an interpolation and a fill colour."""
        return ROTATE <= self.number < FIRST_REGISTERED

    @property
    def has_argument(self) -> bool:
        """Whether it takes an argument besides the image."""
        return any(each.kind != NO_ARGUMENT for each in self.magnitude_maps.values())


_ENHANCE, _ENHANCE_INCREASING = MagnitudeMap(LINEAR, 1.8, 0.1), MagnitudeMap(AROUND_ONE, 0.9, low=0.1)
_TRANSLATE = MagnitudeMap(SIGNED, math.nan)
_FACTORS = (0.1, 0.4, 0.7, 1.0, 1.3, 1.6, 1.9)
_BOTH_WAYS = np.linspace(-1, 1, 7)


def _enhance(number: int, name: str) -> Operation:
    maps = {name: _ENHANCE, f"{name}Increasing": _ENHANCE_INCREASING}
    return Operation(number, f"{name}, factor", maps, _FACTORS)


# In the order of the sheet. The maps are timm's, and the arguments shown cover their whole range.
OPERATIONS = [
    Operation(AUTOCONTRAST, "AutoContrast", {"AutoContrast": MagnitudeMap()}, (0,)),
    Operation(EQUALIZE, "Equalize", {"Equalize": MagnitudeMap()}, (0,)),
    Operation(INVERT, "Invert", {"Invert": MagnitudeMap()}, (0,)),
    Operation(
        POSTERIZE,
        "Posterize, bits kept",
        {
            "Posterize": MagnitudeMap(RISING, 4),
            "PosterizeIncreasing": MagnitudeMap(FALLING, 4, 4),
            "PosterizeOriginal": MagnitudeMap(RISING, 4, 4),
        },
        (8, 6, 4, 3, 2, 1, 0),
    ),
    Operation(
        SOLARIZE,
        "Solarize, threshold",
        {
            "Solarize": MagnitudeMap(RISING, 256, high=256),
            "SolarizeIncreasing": MagnitudeMap(FALLING, 256, 256, high=256),
        },
        (256, 230, 179, 128, 77, 26, 0),
    ),
    Operation(
        SOLARIZE_ADD,
        "SolarizeAdd, amount",
        {"SolarizeAdd": MagnitudeMap(RISING, 110, high=128)},
        (0, 11, 33, 55, 77, 99, 110),
    ),
    Operation(
        COLOR,
        "Color, factor",
        {
            "Color": _ENHANCE,
            "ColorIncreasing": _ENHANCE_INCREASING,
            "Desaturate": MagnitudeMap(ONE_MINUS, 0.5, 0.5, 0.5, 1),
        },
        (0.0, *_FACTORS[1:]),
    ),
    _enhance(CONTRAST, "Contrast"),
    _enhance(BRIGHTNESS, "Brightness"),
    _enhance(SHARPNESS, "Sharpness"),
    Operation(
        BLUR,
        "GaussianBlur, pixels",
        {
            "GaussianBlur": MagnitudeMap(LINEAR, 2.0 - 0.1, 0.1, 0.1, 2),
            "GaussianBlurRand": MagnitudeMap(UNIFORM, 2, 0.1),
        },
        (0.1, 0.4, 0.7, 1.0, 1.3, 1.6, 2.0),
    ),
    Operation(ROTATE, "Rotate, degrees", {"Rotate": MagnitudeMap(SIGNED, 30)}, 30 * _BOTH_WAYS),
    Operation(SHEAR_X, "ShearX", {"ShearX": MagnitudeMap(SIGNED, 0.3)}, 0.3 * _BOTH_WAYS),
    Operation(SHEAR_Y, "ShearY", {"ShearY": MagnitudeMap(SIGNED, 0.3)}, 0.3 * _BOTH_WAYS),
    Operation(TRANSLATE_X_REL, "TranslateX, fraction of the width", {"TranslateXRel": _TRANSLATE}, 0.45 * _BOTH_WAYS),
    Operation(
        TRANSLATE_Y_REL, "TranslateY, fraction of the height", {"TranslateYRel": _TRANSLATE}, 0.45 * _BOTH_WAYS
    ),
]


@check_arguments
def register_operation(
    name: Name, function: Function, magnitude_map: MagnitudeMap, sets: Sequence[str] = (), shown: Numbers = ()
) -> None:
    """Add an operation: with sets `("mine",)`, `rand-m9-tmine` becomes a valid policy.

    `function(image, argument)` changes an image, uint8 [H, W, 3], in place; it is called on several threads. The
    argument is sampled by `magnitude_map`. `shown` are the arguments on the sheet of `widemix analyse augment`;
    without any, the map's over all magnitudes. Policies with such an operation run image by image in Python; all
    others stay compiled. `ValueError` if the name is taken or a set is timm's.
    """
    if any(name in operation.magnitude_maps for operation in OPERATIONS):
        raise ValueError(f"operation {name!r}: is registered already; choose another name")
    add_to_sets(name, sets)
    number = FIRST_REGISTERED + sum(operation.function is not None for operation in OPERATIONS)
    OPERATIONS.append(Operation(number, name, {name: magnitude_map}, shown, function=function))


def find_operation(name: str) -> tuple[Operation, MagnitudeMap]:
    """The operation behind a name that policies use, and the name's magnitude map; `InputError` if there is none."""
    for operation in OPERATIONS:
        if name in operation.magnitude_maps:
            return operation, operation.magnitude_maps[name]
    raise InputError(f"operation {name!r}: no such operation; add it by widemix.data.augment.registry")
