"""Sections of a recipe from arguments of functions."""

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from pipeline.errors import InputError
from pipeline.section import Section

AnySection = TypeVar("AnySection", bound=Section)
# Keys of sections that have another name here: timm's.
_NAMES = {"aug_repeats": "num_aug_repeats", "workers": "num_workers", "mix_mode": "mixup_mode"}


def jitter_strengths(color_jitter: float | Sequence[float]) -> tuple[float, ...]:
    """Brightness, contrast, saturation and hue; one number is the first three, as in timm."""
    if isinstance(color_jitter, int | float):
        return (color_jitter,) * 3 + (0.0,)
    return (*color_jitter, *(0.0,) * (4 - len(color_jitter)))


def build_section(kind: type[AnySection], /, where: str = "", **values: Any) -> AnySection:
    """A recipe's section; what is wrong becomes an `InputError` with the argument's name."""
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        given = f"{_NAMES.get(key, key)} {first['input']!r}: " if key else ""
        raise InputError(where + given + first["msg"].removeprefix("Value error, ")) from None
