"""A cell of a study: one run, of a recipe with some keys changed, in a folder of its own."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.recipe import Recipe, load_recipe, recipe_hash


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    name: of its run folder, within the study's folder.
    path: the recipe that it starts from.
    varied: the keys that tell it from other cells, as `("section.key", "YAML value")`.
    shared: overrides that all cells of the study have, applied before `varied`.
    line: label of the line of the figure that it belongs to.
    across: what the x axis of the figure is.
    """

    name: str
    path: Path
    varied: tuple[tuple[str, str], ...]
    shared: tuple[tuple[str, str], ...] = ()
    line: str = ""
    across: str = "width"

    @property
    def overrides(self) -> tuple[tuple[str, str], ...]:
        """All changes of the recipe, those shared by all cells first."""
        return (*self.shared, *self.varied)

    def recipe(self) -> Recipe:
        """Load the recipe with the overrides applied; raises `InputError`."""
        return load_recipe(self.path, self.overrides)

    def has_result(self, folder: Path) -> bool:
        """Whether the study's folder has a complete run of this name, whatever its recipe was."""
        return (folder / self.name / "done.json").exists()

    def is_done(self, folder: Path) -> bool:
        """Whether the study's folder has a complete run of exactly this recipe."""
        if not self.has_result(folder):
            return False
        done = json.loads((folder / self.name / "done.json").read_text())
        return done["recipe"] == recipe_hash(self.recipe())


def cell_name(varied: Iterable[tuple[str, str]], prefix: str = "") -> str:
    """Return the name of a cell's run folder: `[("model.depth", "2"), ("optim.lr", "1e-3")]` is `depth-2_lr-1e-3`."""
    parts = [f"{key.partition('.')[2]}-{re.sub(r'[^A-Za-z0-9.+-]+', '_', text).strip('_.')}" for key, text in varied]
    return "_".join([*([prefix] if prefix else []), *parts])


def yaml_text(value: object) -> str:
    """Return a value that YAML has read as text that YAML reads as the same value."""
    return value if isinstance(value, str) else json.dumps(value)
