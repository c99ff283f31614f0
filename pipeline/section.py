"""The base of recipe sections, and the types of their keys."""

import difflib
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema


def _part_of_white(value: float) -> float:
    """Refuse what FFCV's `NormalizeImage` takes, which is on a scale of 0 to 255: it would make all images alike."""
    if value > 1:
        raise ValueError("is not on a scale of 0 to 1; divide it by 255")
    return value


def _names_are_text(values: Any) -> Any:
    """Names of classes that YAML reads as numbers, as the text that they are."""
    return (
        {str(n) if type(n) is int else n: plain(v) for n, v in values.items()}
        if isinstance(values, Mapping)
        else values
    )


Fraction = Annotated[float, Field(ge=0, le=1)]
Mean = Annotated[float, Field(ge=0), AfterValidator(_part_of_white)]
Deviation = Annotated[float, Field(ge=1e-6), AfterValidator(_part_of_white)]
Positive = Annotated[int, Field(gt=0, lt=2**63)]
Seconds = Annotated[int, Field(gt=0, le=10**9)]  # 32 years; clocks count in nanoseconds, in 63 bits
Depth = Annotated[int, Field(gt=0, le=10_000)]
DropPath = Annotated[float, Field(ge=0, lt=1)]  # 1 would skip every block, and divide by 0
Decay = Annotated[float, Field(ge=0, lt=1)]
# Of keys from whose meaning no narrower range follows: in float32 their squares and sums are finite, and not zero.
Amount = Annotated[float, Field(ge=0, le=1e9)]
PositiveAmount = Annotated[float, Field(ge=1e-9, le=1e9)]
ByClass = Annotated[dict[str, Amount], BeforeValidator(_names_are_text)]  # of classes, by name
Epsilon = Annotated[float, Field(ge=1e-30, le=1000)]
Epochs = Annotated[float, Field(ge=0, le=1_000_000)]
Pair = Annotated[tuple[float, float], Field(strict=False)]
Decays = Annotated[tuple[Decay, Decay], Field(strict=False)]
Means = Annotated[tuple[Mean, Mean, Mean], Field(strict=False)]
Deviations = Annotated[tuple[Deviation, Deviation, Deviation], Field(strict=False)]
Jitter = Annotated[tuple[float, float, float, float], Field(strict=False)]


def key(default, description: str):
    """A recipe key with its default (`...` for none) and the sentence that `widemix train --help` prints."""
    return Field(default=default, description=description)


class _Masked:
    """In place of a masked number of NumPy, which as a float is NaN, with a warning."""

    def __repr__(self) -> str:
        return "masked"


_MASKED = _Masked()


def plain(value: Any) -> Any:
    """A number of any integer type as an int, one of NumPy as Python's own; all else as it is."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    try:
        if not hasattr(value, "dtype") or getattr(value, "ndim", None) != 0:
            return operator.index(value)
        if getattr(value, "mask", False):
            return _MASKED
        number = value.item()  # None of NaT, a tuple of a record
        return number if type(number) in (bool, int, float, str) else value
    except Exception:  # of any class: it has no such number, as a tensor on the meta device
        return value


class HasHelp(Protocol):
    """An entry of a table that a key chooses from."""

    @property
    def help(self) -> str:
        """Return the entry's description, a few words."""


@dataclass(frozen=True)
class OneOf:
    """Annotation of a str key whose value names an entry of a table, to which others may add.

    The table is read when a recipe is loaded or `--help` is printed. A name that is not in it is an error that
    suggests the nearest one.
    """

    noun: str  # what an entry is, in the error
    table: Mapping[str, HasHelp]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Called by pydantic: the annotated type's own validation, then `check`."""
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def check(self, name: str) -> str:
        """The name itself; ValueError where the table does not have it."""
        if name not in self.table:
            close = difflib.get_close_matches(name, self.table, n=1, cutoff=0.5)
            suggestion = f"did you mean {close[0]}? " if close else ""
            raise ValueError(f"no such {self.noun}; {suggestion}known are {', '.join(self.table)}")
        return name

    @property
    def choices(self) -> str:
        """All names, as `--help` has them for a Literal: "adamw|sgd"."""
        return "|".join(self.table)

    @property
    def help(self) -> str:
        """Every name with the help of its entry."""
        return "; ".join(f"{name}: {entry.help}" for name, entry in self.table.items())


class Section(BaseModel):
    """A section of a recipe: immutable; unknown keys, values of another type and infinities are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_plain(cls, values: Any) -> Any:
        return {name: plain(value) for name, value in values.items()} if isinstance(values, dict) else values
