"""Errors in the values of a recipe, as one line that names file or command line, key and cure."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from widemix.errors import shown
from widemix.recipe.key_table import families, key_names, keys
from widemix.recipe.other_names import other_name
from widemix.recipe.schema import RecipeFields

_OF_KEYS = ("extra_forbidden", "missing", "union_tag_not_found", "union_tag_invalid", "invalid_key")


def error_message(
    error: ValidationError, values: Mapping[str, Any], origin: Mapping[str, str], default_origin: str
) -> str:
    """Return the first of the mistakes that pydantic has found in `values`, and how many more there are.

    origin: for each `section.key`, the file it comes from or "the command line"; default_origin: that of all others.
    """
    # A mistyped key is often the reason why another one is missing: report it first.
    first, *others = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    path, family = _path(first, values)
    name = ".".join(path)
    # Of a key that takes one of several types, each type has its own mistake: all of them are one.
    of_types = [
        each for each in others if first["type"] not in _OF_KEYS and _place(each, values) == _place(first, values)
    ]
    others = [each for each in others if each not in of_types]
    where = origin.get(name, default_origin)
    for each in of_types:
        if isinstance(first["input"], Mapping) and len(each["loc"]) > len(first["loc"]):  # about an item of a mapping
            first, of_types, name = each, [], f"{name}.{each['loc'][-1]}"
    more = f" (and {len(others)} more)" if others else ""
    if first["type"] == "extra_forbidden":
        leaf = name not in RecipeFields.model_fields and any(known.endswith(f".{name}") for known in key_names())
        table = key_names() if "." in name or leaf else list(RecipeFields.model_fields)
        if family and name in table:
            other = other_name(name.rpartition(".")[2])
            cure = f"; did you mean {other}?" if other in table else ""
            return f"{where}: {name} is not a key of kind {family}{cure}{more}"
        return f"{where}: unknown key {name}{suggest(name, table)}{more}"
    if first["type"] == "missing" and isinstance(first["loc"][-1], int):
        absent = [each for each in others if each["loc"][:-1] == first["loc"][:-1]]
        length = first["loc"][-1] + 1 + len(absent)
        more = f" (and {len(others) - len(absent)} more)" if len(others) > len(absent) else ""
        return f"{where}: {name} {_as_yaml(first['input'])}: input should be a list of {length} values{more}"
    if first["type"] == "too_long":
        length = first["ctx"]["max_length"]
        return f"{where}: {name} {_as_yaml(first['input'])}: input should be a list of {length} values{more}"
    if first["type"] == "missing":
        return f"{where}: {name} is missing{more}"
    if first["type"] == "union_tag_not_found":
        return f"{where}: {name}.kind is missing{more}"
    if first["type"] == "union_tag_invalid":
        kinds = keys()[f"{name}.kind"][0].split("|")
        where = origin.get(f"{name}.kind", default_origin)
        given = first["input"]["kind"]
        close = difflib.get_close_matches(str(given), kinds, n=1, cutoff=0.5)
        cure = f"did you mean {close[0]}?" if close else f"choose from {', '.join(kinds)}"
        return f"{where}: {name}.kind {_as_yaml(given)}: no such kind; {cure}{more}"
    if first["type"] == "invalid_key":
        section = f"{first['loc'][0]}: " if len(first["loc"]) > 1 else ""
        return f"{where}: {section}the key {_as_yaml(first['input'])} is not text; put quotes around it{more}"
    message = re.sub(" or instance of [A-Za-z]+$", "", first["msg"])
    message = message.removeprefix("Value error, ").replace("valid tuple", "list")
    default = keys()[name].default if name in keys() and not isinstance(first["input"], str) else ()
    example = list(default) if isinstance(default, tuple) and default else f"[{first['input']}]"
    message = message.replace("be a list", f"be a list, such as {example}")
    message = ", or ".join([message, *(each["msg"].removeprefix("Input should be ") for each in of_types)])
    message = message.replace("valid dictionary", "mapping of keys")
    given = f" {_as_yaml(first['input'])}" if not isinstance(first["input"], (dict, BaseModel)) else ""
    subject = f"{name}{given}: " if name else ""
    return f"{where}: {subject}{message[0].lower() + message[1:] if subject else message}{more}"


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return shown(value)


def _path(error: Any, values: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """The key that one of pydantic's errors is about, and the kind of its section where there are several.

    pydantic puts the type behind the key of a union: `constrained-int` and the like, below what is no mapping.
    """
    path = [part for part in error["loc"] if isinstance(part, str)]
    family = _kind(path, values)
    value: Any = values
    for number, part in enumerate(path):
        if not isinstance(value, Mapping) or (part not in value and error["type"] not in _OF_KEYS):
            return path[:number], family
        value = value.get(part, {})
    return path, family


def _place(error: Any, values: Mapping[str, Any]) -> list[Any]:
    """The key, and which of its items."""
    return [*_path(error, values)[0], *(part for part in error["loc"] if isinstance(part, int))]


def _kind(path: list[str], values: Mapping[str, Any]) -> str | None:
    """The kind of the section at which a pydantic error's path begins, taken out of the path if it is there."""
    if len(path) < 2 or len(families(path[0])) == 1:
        return None
    # The path of an error in a pydantic union has the kind after the section, the path of one in `model` does not.
    return values["model"]["kind"] if path[0] == "model" else path.pop(1)


def suggest(name: str, table: Iterable[str], prefix: str = "") -> str:
    """Return the end of an error message: "; did you mean KEY?", the key in `table` that other libraries call so, or
    else the nearest, after a prefix.
    """
    names = list(table)
    leaf = name.rsplit(".", 1)[-1]
    if other_name(leaf) in names:
        return f"; did you mean {prefix}{other_name(leaf)}?"
    same_leaf = [known for known in names if known.rsplit(".", 1)[-1] == leaf]
    close = same_leaf or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not close:
        by_leaf = {known.rsplit(".", 1)[-1]: known for known in names}
        close = [by_leaf[match] for match in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.5)]
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    return f"; choose from {', '.join(names)}" if len(names) < 12 else "; `widemix train --help` lists them"
