"""Checks the arguments of public functions against their annotations, by the rules of a recipe's keys.

An int may be of any integer type, and numbers and bools may be NumPy's; a bool is no number, nor is a str, and no
number may be infinite. What is wrong is an `InputError` that names the argument.
"""

import dataclasses
import errno
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from widemix.errors import InputError, shown
from widemix.section import Section, plain

AnySection = TypeVar("AnySection", bound=Section)
Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")
_PLAIN: dict[str, type] = {"str": str, "int": int, "bool": bool}
# Keys of sections that are arguments of other names: timm's.
_NAMES = {"aug_repeats": "num_aug_repeats", "workers": "num_workers", "mix_mode": "mixup_mode"}


def _check_path(path: str | Path) -> str | Path:
    if path == "":
        raise ValueError("is empty; give a path, or '.' for this folder")
    try:
        os.lstat(path)
    except ValueError:
        raise ValueError("has a NUL character; no file name can have one") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError("is too long for a file's name") from None
    return path


FilePath = Annotated[str | Path, AfterValidator(_check_path)]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Whole = Annotated[int, Field(ge=0, lt=2**63)]
Size = Annotated[int, Field(ge=1, lt=2**31)]
Rank = Annotated[int, Field(ge=0, lt=2**31)]
Epoch = Annotated[int, Field(ge=0, lt=2**32)]


def is_iterable(value: Any) -> bool:
    """Whether a value, which is no text, holds others; an array without axes holds one."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes) and getattr(value, "ndim", 1) != 0


def numbers(value: Any) -> Any:
    """Several numbers, as of an array, as a tuple; what is wrong as it is, which is then named."""
    unordered = isinstance(value, bytearray | memoryview | Mapping | Set)  # or bytes
    return tuple(map(plain, value)) if is_iterable(value) and not unordered else value


Name = Annotated[str, Field(min_length=1, pattern=r"^\S+$")]
Numbers = Annotated[Sequence[float], BeforeValidator(numbers)]


def check_arguments(
    function: Callable[Parameters, Result], advice: Mapping[str, str] | None = None
) -> Callable[Parameters, Result]:
    """The function, its arguments checked against its annotations; `SkipValidation` leaves one to the function.

    advice: what to say of names that are no arguments, but that somebody may take for one.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
            refuse_unknown(keywords, [name for name in signature.parameters if name != "self"], advice or {})
        given = signature.bind(*args, **keywords)
        kind = _arguments_of(function)
        arguments = build_section(kind, **{k: v for k, v in given.arguments.items() if k in kind.model_fields})
        given.arguments.update((name, getattr(arguments, name)) for name in arguments.model_fields_set)
        return function(*given.args, **given.kwargs)

    return checked


class _Arguments(Section):
    model_config = ConfigDict(arbitrary_types_allowed=True)


@functools.cache
def _arguments_of(function: Callable[..., Any]) -> type[_Arguments]:
    """A section with the annotated arguments as keys. Those that are not given have their defaults, unchecked."""
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.name in hints and p.kind is not p.VAR_KEYWORD]
    fields: dict[str, Any] = {name: (_checked(hints[name]), None) for name in named}
    return create_model(function.__qualname__, __base__=_Arguments, **fields)


def _checked(hint: Any) -> Any:
    """The annotation itself; of an entry of a table, whose annotations may name what is not imported, a check."""
    if not dataclasses.is_dataclass(hint) and not hasattr(hint, "_fields"):
        return hint
    return Annotated[Any, AfterValidator(functools.partial(_check_entry, hint))]


def _check_entry(kind: type, entry: Any) -> Any:
    """ValueError unless an entry is of its class, with functions, texts and numbers where they belong."""
    if not isinstance(entry, kind):
        raise ValueError(f"Input should be of the class {kind.__name__}")
    for name, annotation in kind.__annotations__.items():
        hint, value = str(getattr(annotation, "__name__", annotation)), getattr(entry, name)
        plain_type = _PLAIN.get(hint.partition(" | ")[0])
        if value is None and "None" in hint:
            continue
        if "Callable" in hint and not callable(value):
            raise ValueError(f"{name} {shown(value)} should be a function")
        if plain_type is not None and type(value) is not plain_type:
            raise ValueError(f"{name} {shown(value)} should be of the type {plain_type.__name__}")
    return entry


def refuse_unknown(names: Iterable[str], known: Sequence[str], advice: Mapping[str, str], where: str = "") -> None:
    """`InputError` for the first name that is not known: with the advice for it, else with the nearest known one."""
    for name in names:
        if name in known:
            continue
        if name in advice:
            raise InputError(f"{where}no argument {name!r}: it {advice[name]}")
        near = get_close_matches(name, known, 1)
        raise InputError(f"{where}no argument {name!r}; {f'did you mean {near[0]}?' if near else ', '.join(known)}")


def build_section(kind: type[AnySection], /, where: str = "", **values: Any) -> AnySection:
    """A recipe's section; what is wrong becomes an `InputError` with the argument's name."""
    try:
        return kind(**values)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        first = errors[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        given = f"{_NAMES.get(key, key)} {shown(first['input'])}: " if key else ""
        # A value of several types has an error for each of them.
        about = [each for each in errors if each["loc"][:1] == first["loc"][:1]]
        reasons = dict.fromkeys("is too short" if each["type"] == "missing" else each["msg"] for each in about)
        reason, *others = (each.removeprefix("Value error, ") for each in reasons)
        others = [f", or {other.removeprefix('Input should be ')}" for other in others]
        raise InputError(where + given + "".join([reason, *others])) from None
