"""The keys of recipes: their types, defaults and descriptions, for `--help`, the reference and suggestions."""

from collections.abc import Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from widemix.models.families import sections
from widemix.recipe.schema import RecipeFields
from widemix.section import OneOf

SECTIONS = [name for name in RecipeFields.model_fields if name != "plugins"]


class Key(NamedTuple):
    """A recipe key: the values that it takes, its default (`...` for none) and a sentence."""

    values: str
    default: Any
    text: str


def tables(section: str) -> Iterator[tuple[str, dict[str, Key]]]:
    """The keys of a section, as (title, keys by `section.key`): those of all its kinds, then those of each alone."""
    every = {
        family: {f"{section}.{name}": _key(info) for name, info in family.model_fields.items()}
        for family in families(section)
    }
    first, *others = every.values()
    shared = {name: entry for name, entry in first.items() if all(other.get(name) == entry for other in others)}
    if shared:
        yield section, shared
    for family, known in every.items():
        if own := {name: entry for name, entry in known.items() if name not in shared}:
            kinds = _type_name(family.model_fields["kind"].annotation).replace("|", ", ")
            yield f"{section}, kind {kinds}", own


def keys() -> dict[str, Key]:
    """Every `section.key` with its type, default (`...` for none) and description.

    A section of several families (`model`) has the keys of all; where they share one, its values are joined.
    """
    table: dict[str, Key] = {}
    for section in SECTIONS:
        for family in families(section):
            for name, info in family.model_fields.items():
                entry = _key(info)
                known = table.get(f"{section}.{name}")
                table[f"{section}.{name}"] = _joined(known, entry) if known else entry
    return table


def key_names() -> list[str]:
    """Return every `section.key`. Much faster than `keys`, which also makes the texts."""
    return [*_key_names(tuple(sections()))]


@cache
def _key_names(_: tuple[type[BaseModel], ...]) -> dict[str, None]:
    """With the registered sections of models."""
    return dict.fromkeys(f"{s}.{name}" for s in SECTIONS for family in families(s) for name in family.model_fields)


def value_types(name: str) -> set[type]:
    """The types of the values that a `section.key` takes, such as str and NoneType; none of one that there isn't."""
    section, _, leaf = name.partition(".")
    known = [family.model_fields.get(leaf) for family in families(section)] if section in SECTIONS else []
    return {kind for info in known if info for kind in _value_types(info.annotation)}


def takes_text(name: str) -> bool:
    """Whether a `section.key` takes text alone, such as a path or a name, or null."""
    return str in (types := value_types(name)) and types <= {str, NoneType}


def families(section: str) -> tuple[type[BaseModel], ...]:
    """The classes that a section may have: the registered ones of `model`, one, or those of a union by `kind`."""
    if section == "model":
        return tuple(sections())
    annotation = RecipeFields.model_fields[section].annotation
    if isinstance(annotation, type):
        return (annotation,)
    return tuple(one if isinstance(one, type) else get_args(one)[0] for one in get_args(annotation))


def _joined(one: Key, other: Key) -> Key:
    """A key that two families share: the values, and the descriptions, of both, each once."""
    values = "|".join(dict.fromkeys([*one.values.split("|"), *other.values.split("|")]))
    descriptions = one.text if other.text in one.text else f"{one.text}; {other.text}"
    return Key(values, one.default if one.default == other.default else ..., descriptions)


def _key(info: FieldInfo) -> Key:
    values, text = _type_name(info.annotation), info.description or ""
    for one in info.metadata:
        if isinstance(one, OneOf):
            values, text = one.choices, f"{text}. {one.help}"
    return Key(values, ... if info.is_required() else info.default, text)


def _value_types(annotation: Any) -> Iterator[type]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from map(type, arguments)
    elif origin is Annotated or origin in (Union, UnionType):
        for part in arguments[: 1 if origin is Annotated else None]:
            yield from _value_types(part)
    else:
        yield origin or annotation


def _type_name(annotation: Any) -> str:
    """The values that a key takes, as `--help` shows them: `int`, `float|null`, `list` or `auto|random|paged`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (Union, UnionType):
        return "|".join(dict.fromkeys(_type_name(part) for part in arguments))
    if origin in (tuple, list):
        return "list"
    if origin is dict:
        return "mapping"
    return "null" if annotation is NoneType else getattr(annotation, "__name__", "value")
