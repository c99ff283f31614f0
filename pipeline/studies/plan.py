"""A study's file: which recipes to start from, which keys to vary, and a row of values for each cell."""

import fnmatch
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import TypeAdapter, ValidationError, model_validator

from pipeline.errors import InputError
from pipeline.recipe import Recipe, load_recipe, recipe_hash
from pipeline.section import Section, key


class Entry(Section):
    """One entry of a study's file: the product of its recipes and its cells."""

    recipes: list[str] = key(..., "recipes to start from, as paths from the study's folder")
    keys: list[str] = key(..., "section.key names that vary")
    cells: list[list[Any]] = key(..., "for each cell a value for each key")
    lines: list[str] = key([], "keys whose values tell the figure's lines apart, beside the recipe")
    name: str = key("", "what tells the lines of this entry from those of others")
    across: Literal["width", "depth_to_width"] = key("width", "the figure's x: m, or p / log2 d")

    @model_validator(mode="after")
    def rows_fit(self):
        for cell in self.cells:
            if len(cell) != len(self.keys):
                raise ValueError(f"the cell {cell} has {len(cell)} values, there are {len(self.keys)} keys")
        if unknown := set(self.lines) - set(self.keys):
            raise ValueError(f"lines: {min(unknown)} is none of the keys")
        return self


@dataclass(frozen=True)
class Cell:
    """A run of a study."""

    name: str  # of its folder
    path: Path  # of the recipe that it starts from
    overrides: tuple[tuple[str, str], ...]
    line: str  # of the figure
    across: str

    def recipe(self) -> Recipe:
        return load_recipe(self.path, self.overrides)

    def is_done(self, folder: Path) -> bool:
        """Whether its run in the study's folder is complete, and of this very recipe."""
        done = folder / self.name / "done.json"
        return done.exists() and json.loads(done.read_text())["recipe"] == recipe_hash(self.recipe())


def read_studies(paths: Sequence[Path], overrides: Sequence[tuple[str, str]] = (), only: str = "*") -> list[Cell]:
    """The cells whose names match the shell pattern `only`, with these overrides of all; `InputError`."""
    cells = [cell for path in paths for entry in _entries(path) for cell in _cells(path, entry, overrides)]
    names = [cell.name for cell in cells]
    files = ", ".join(map(str, paths))
    if twice := {name for name in names if names.count(name) > 1}:
        raise InputError(f"{files}: the cell {min(twice)} is there twice")
    if across := {cell.across for cell in cells} - {cells[0].across if cells else ""}:
        raise InputError(f"{files}: some are drawn across {cells[0].across}, some across {min(across)}")
    chosen = [cell for cell in cells if fnmatch.fnmatchcase(cell.name, only)]
    if not chosen:
        raise InputError(
            f"{files}: no cell is called {only}; the first is {names[0] if names else 'not there either'}"
        )
    for cell in chosen:
        cell.recipe()  # complains before the first is trained
    return chosen


def _entries(path: Path) -> list[Entry]:
    try:
        return TypeAdapter(list[Entry]).validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise InputError(f"{path}: is not YAML") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{path}: {where or 'the whole'}: {first['msg'].removeprefix('Value error, ')}") from None


def _cells(path: Path, entry: Entry, overrides: Sequence[tuple[str, str]]) -> list[Cell]:
    if varied := [name for name, _ in overrides if name in entry.keys]:
        raise InputError(f"--{varied[0]}: {path} varies it")
    cells = []
    for recipe in entry.recipes:
        origin = path.parent / recipe
        start = f"{origin.resolve().parent.name}-{origin.stem}"
        for row in entry.cells:
            pairs = [(name, _text(value)) for name, value in zip(entry.keys, row, strict=True)]
            words = [word(name, text) for name, text in pairs]
            told = [f"{name.partition('.')[2]} {text}" for name, text in pairs if name in entry.lines]
            line = ", ".join([start, *filter(None, [entry.name]), *told])
            cells.append(Cell("_".join([start, *words]), origin, (*overrides, *pairs), line, entry.across))
    return cells


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def word(name: str, value: str) -> str:
    """A part of a cell's name: `("model.depth", "2")` is `depth-2`."""
    return f"{name.partition('.')[2]}-{re.sub(r'[^A-Za-z0-9.+-]+', '_', value).strip('_.')}"
