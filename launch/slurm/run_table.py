"""The runs of a study as a job array, one line each in runs.tsv.

A line is the run's name, a copy of its recipe and its overrides, separated by tabs. The number of a line is the
run's index in Slurm's arrays, so lines keep their numbers. The name has a hash of the resolved recipe, so that runs
of another recipe have other lines and other run folders.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from widemix.errors import InputError
from widemix.recipe import Recipe, recipe_hash

TABLE = "runs.tsv"


class Run(Protocol):
    """A run of the array: a recipe with overrides, in a run folder of its own."""

    @property
    def name(self) -> str:
        """Name of its run folder."""

    @property
    def recipe(self) -> Recipe:
        """The recipe with the overrides applied."""

    @property
    def overrides(self) -> Sequence[tuple[str, str]]:
        """All changes of the recipe file, as `("section.key", "YAML value")`."""

    def has_ended(self, folder: Path) -> bool:
        """Whether it has ended in the folder of all runs."""


def kept_path(folder: Path, recipe: Recipe) -> Path:
    """Where `submit` keeps a recipe: its file may be edited while the job waits, or runs and is requeued."""
    return folder / "slurm" / f"recipe-{recipe_hash(recipe)}.yaml"


def table_line(run: Run, folder: Path) -> str:
    """Return the run's line of the folder's runs.tsv, without the line break.

    Raises `InputError` for an override that would be cut there.
    """
    overrides = [f"--{key}={value}" for key, value in run.overrides]
    if cut := [text for text in overrides if "\t" in text or len(text.splitlines()) > 1]:
        raise InputError(f"{cut[0]!r}: a job's values have no tab and no line break")
    return "\t".join([run.name, str(kept_path(folder, run.recipe)), *overrides])


def merge(folder: Path, runs: Sequence[Run]) -> list[str]:
    """Return the lines of the folder's runs.tsv, with those of these runs replaced, or appended if they are new."""
    table = folder / TABLE
    lines = table.read_text().splitlines() if table.exists() else []
    known = {line.partition("\t")[0]: line for line in lines}
    known |= {run.name: table_line(run, folder) for run in runs}
    return list(known.values())


def unfinished(folder: Path, lines: Sequence[str], runs: Sequence[Run]) -> list[int]:
    """Return the line numbers, from 1, of the runs that have not ended."""
    numbers = {line.partition("\t")[0]: number for number, line in enumerate(lines, 1)}
    return sorted(numbers[run.name] for run in runs if not run.has_ended(folder))


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as sbatch's --array takes them: `[1, 2, 3, 7]` is `1-3,7`."""
    parts = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(parts)
