"""Every key of numbers has a range: what float32 or a 64-bit integer cannot compute with is refused by name."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from widemix.models.families import sections
from widemix.recipe import Recipe
from widemix.recipe.data import DataSection, TextDataSection
from widemix.recipe.key_table import families
from widemix.section import Section
from widemix.studies.papers import Paper
from widemix.studies.study import Study

ENDS: dict[str, dict[str, list[Any]]] = yaml.safe_load(Path(__file__).with_name("ranges.yaml").read_text())
WRONG = {"int": (-(10**30), 10**30), "float": (-1e30, 1e30, math.nan, math.inf, -math.inf)}


def numeric_keys() -> Iterator[tuple[type[Section], str, str, int]]:
    """(section, key, type, how many numbers it takes, 0 where it is not a list) of each key of numbers."""
    known = [info.annotation for info in Recipe.model_fields.values() if isinstance(info.annotation, type)]
    every = (*(kind for kind in known if issubclass(kind, Section)), DataSection, TextDataSection, *sections())
    for section in dict.fromkeys(every):
        for name, info in section.model_fields.items():
            described = f"{info.annotation} {info.metadata}".split("FieldInfo")[0]
            kind = next((kind for kind in WRONG if kind in described), None)
            if kind is not None and "Literal" not in described and "..." not in described:
                yield section, name, kind, described.count(kind) if "tuple" in described else 0


def refuses(section: type[Section], name: str, value: object) -> bool:
    try:
        section(**{name: value})
    except ValidationError as error:
        return any(
            name in (*each["loc"], each["msg"].split()[2]) for each in error.errors() if each["type"] != "missing"
        )
    return False


@pytest.mark.parametrize(("section", "name", "kind", "count"), list(dict.fromkeys(numeric_keys())))
def test_a_number_out_of_range_is_refused(section: type[Section], name: str, kind: str, count: int) -> None:
    taken = [value for value in WRONG[kind] if not refuses(section, name, (value,) * count if count else value)]
    assert taken == []


def test_both_kinds_of_keys_are_found() -> None:
    found = {name for _, name, _, _ in numeric_keys()}
    assert found >= {"mixup", "std", "mean", "smoothing", "color_jitter", "betas", "eps", "timeout_s", "seed"}


@pytest.mark.parametrize("key", ENDS)
def test_a_number_is_taken_up_to_its_ends(key: str) -> None:
    section, name = key.split(".")
    info = families(section)[0].model_fields[name]
    adapter = TypeAdapter(Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation)
    for value in ENDS[key]["takes"]:
        assert adapter.validate_python(value, strict=True) == value
    for value in ENDS[key]["refuses"]:
        with pytest.raises(ValidationError):
            adapter.validate_python(value, strict=True)


def test_defaults_are_values_that_their_keys_take() -> None:
    """pydantic looks at none of them. Helps are sentences."""
    waiting, found = [Section], []
    while waiting:
        waiting += (section := waiting.pop()).__subclasses__()
        if section.__module__ != "widemix.arguments":  # whose defaults are those of functions
            found += [(section, *field) for field in section.model_fields.items()]
    assert {Study, Paper, Recipe} <= {section for section, _, _ in found}
    for section, name, info in found:
        kind: Any = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
        if not info.is_required():
            TypeAdapter(kind).validate_python(info.get_default(call_default_factory=True))
        if info.description is not None:
            assert " " in info.description, (section, name)
