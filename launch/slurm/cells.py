"""The cells of a study: every combination of some keys' values, a run folder each, a line each in cells.tsv.

The number of a cell's line is its index in Slurm's arrays, so lines are only ever added.
"""

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from pipeline.errors import InputError
from pipeline.studies.plan import word

TABLE = "cells.tsv"


@dataclass(frozen=True)
class Cell:
    """A run of a study: the name of its folder and what it changes in the recipe."""

    name: str
    overrides: tuple[tuple[str, str], ...]

    def line(self) -> str:
        return "\t".join([self.name, *(f"--{name}={value}" for name, value in self.overrides)])


def cross(vary: list[str]) -> list[Cell]:
    """`["train.seed=0,1", "model.kind=mixer"]` is two cells; `InputError` where a name is not to be had from that."""
    axes = []
    for text in vary:
        match = re.fullmatch(r"(\w+\.\w+)=(.+)", text)
        if not match:
            raise InputError(f"--vary {text}: should be section.key=VALUE,VALUE,...")
        axes.append([(match[1], value) for value in _values(match[2], text)])
    keys = [text.partition("=")[0] for text in vary]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise InputError(f"--vary {twice[0]}: is given twice; put all of its values behind one")
    cells = [Cell("_".join(word(*pair) for pair in pairs), pairs) for pairs in itertools.product(*axes)]
    names = [cell.name for cell in cells]
    if alike := {name for name in names if names.count(name) > 1}:
        raise InputError(f"--vary: two cells would both be called {min(alike)}")
    if long := [name for name in names if len(name) > 200]:
        raise InputError(
            f"--vary: a cell's folder would be called {long[0][:40]}..., of {len(long[0])} letters, over 200"
        )
    return cells


def _values(text: str, given: str) -> list[str]:
    """Separated by commas, but not within brackets."""
    try:
        values = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError:
        raise InputError(f"--vary {given}: the values should be YAML, separated by commas") from None
    words = [value if isinstance(value, str) else json.dumps(value) for value in values]
    if bad := [word for word in words if not word or "\t" in word or "\n" in word]:
        raise InputError(f"--vary {given}: {bad[0]!r} cannot be a value")
    return words


def merge(folder: Path, cells: list[Cell]) -> list[str]:
    """The table's lines with these cells added to those that the folder has; every name keeps its line."""
    table = folder / TABLE
    lines = table.read_text().splitlines() if table.exists() else []
    known = {line.partition("\t")[0]: line for line in lines}
    for cell in cells:
        if known.setdefault(cell.name, cell.line()) != cell.line():
            raise InputError(f"{table}: has another cell called {cell.name}; name another folder with --run-dir")
    return list(known.values())


def unfinished(folder: Path, lines: list[str], cells: list[Cell]) -> list[int]:
    """Line numbers, from 1, of the cells that have no done.json yet."""
    names = {cell.name for cell in cells}
    found = [(number, line.partition("\t")[0]) for number, line in enumerate(lines, 1)]
    return [number for number, name in found if name in names and not (folder / name / "done.json").exists()]


def ranges(numbers: list[int]) -> str:
    """`[1, 2, 3, 7]` as sbatch's `1-3,7`."""
    parts = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(parts)
