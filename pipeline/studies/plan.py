"""Study files: which recipes to start from, which keys to vary, and the values of these keys for each cell."""

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import TypeAdapter, ValidationError, model_validator

from pipeline.errors import InputError
from pipeline.section import Section, key
from pipeline.studies.cell import Cell, cell_name, yaml_text


class Entry(Section):
    """One entry of a study file: every recipe of it with every row of values."""

    recipes: list[str] = key(..., "recipes to start from, relative to the study file")
    keys: list[str] = key(..., "section.key names that vary")
    cells: list[list[Any]] = key(..., "one row a cell: a value for each key")
    lines: list[str] = key([], "keys for whose values the figure has separate lines, as it has for each recipe")
    name: str = key("", "added to the labels of this entry's lines in the figure")
    across: Literal["width", "depth_to_width"] = key(
        "width", "x axis of the figure: effective width m, or p / log2 d"
    )

    @model_validator(mode="after")
    def rows_fit(self):
        """Check that every row has a value for each key, and that `lines` are among the keys."""
        for cell in self.cells:
            if len(cell) != len(self.keys):
                raise ValueError(f"the cell {cell} has {len(cell)} values, there are {len(self.keys)} keys")
        if unknown := set(self.lines) - set(self.keys):
            raise ValueError(f"lines: {min(unknown)} is not one of the keys")
        return self


def read_studies(paths: Sequence[Path], overrides: Sequence[tuple[str, str]] = (), only: str = "*") -> list[Cell]:
    """Return the cells of some study files, in their order.

    overrides: applied to all cells, before the values that the study varies.
    only: a shell pattern; other cells are omitted.

    Raises `InputError` if a file or the recipe of any chosen cell is invalid, or two cells have one name.
    """
    cells = [cell for path in paths for entry in _entries(path) for cell in _cells(path, entry, overrides)]
    names = [cell.name for cell in cells]
    files = ", ".join(map(str, paths))
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise InputError(f"{files}: the cell {min(duplicates)} is duplicated")
    if across := {cell.across for cell in cells} - {cells[0].across if cells else ""}:
        raise InputError(f"{files}: some entries have across: {cells[0].across}, some across: {min(across)}")
    chosen = [cell for cell in cells if fnmatch.fnmatchcase(cell.name, only)]
    if not chosen:
        raise InputError(
            f"{files}: no cell is called {only}; {f'the first is {names[0]}' if names else 'there are no cells'}"
        )
    for cell in chosen:
        cell.recipe()  # raises before the first is trained
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
        raise InputError(
            f"{path}: {where or 'the whole file'}: {first['msg'].removeprefix('Value error, ')}"
        ) from None


def _cells(path: Path, entry: Entry, overrides: Sequence[tuple[str, str]]) -> list[Cell]:
    if conflicts := [name for name, _ in overrides if name in entry.keys]:
        raise InputError(f"--{conflicts[0]}: {path} varies it")
    cells = []
    for recipe in entry.recipes:
        origin = path.parent / recipe
        start = f"{origin.resolve().parent.name}-{origin.stem}"
        for row in entry.cells:
            varied = tuple((name, yaml_text(value)) for name, value in zip(entry.keys, row, strict=True))
            values = [f"{name.partition('.')[2]} {text}" for name, text in varied if name in entry.lines]
            line = ", ".join([start, *filter(None, [entry.name]), *values])
            cells.append(Cell(cell_name(varied, start), origin, varied, tuple(overrides), line, entry.across))
    return cells
