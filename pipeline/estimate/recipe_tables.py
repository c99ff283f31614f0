"""`widemix cost --recipes`: the tables of recipes/README.md, generated from the recipes and their headers."""

import math
import re
from pathlib import Path

from widemix.errors import InputError
from widemix.estimate.hardware import Cluster
from widemix.estimate.report import estimate
from widemix.estimate.tables import short
from widemix.files import atomic_write
from widemix.models.cost import model_cost
from widemix.recipe import load_recipe

FIELDS = ("prepare", "command", "expected", "source", "measured", "cost")
BEGIN, END = "<!-- written by `widemix cost --recipes recipes` -->\n", "<!-- end -->\n"
GPU = "a100"


def shipped(folder: Path) -> list[Path]:
    """Return the recipes in the folders of `folder`, without base recipes and study files."""
    return sorted(path for path in folder.glob("*/*.yaml") if path.parent.name not in ("base", "studies"))


def header(path: Path) -> dict[str, str]:
    """Return the `FIELDS` of a shipped recipe's header comment by name; raises `InputError` if one is missing."""
    fields = header_fields(path)
    for name in FIELDS:
        if name not in fields and name != "measured":
            raise InputError(f"{path}: its header has no line `#   {name}   ...`")
    return fields


def header_fields(path: Path) -> dict[str, str]:
    """Return those of the `FIELDS` that a recipe's header comment has."""
    fields: dict[str, str] = {}
    name = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        start = re.match(rf"#   ({'|'.join(FIELDS)}) +(.+)", line)
        if start:
            name = start[1]
            fields[name] = start[2]
        elif name and line.startswith("#    "):
            fields[name] += " " + line.removeprefix("#").strip()
        elif not line.startswith("#"):
            break
    return fields


def table(folder: Path) -> str:
    """Return all recipes with cost and expected accuracy, then small-scale measurements, as Markdown tables."""
    lines = [
        "| recipe | model | parameters | Omega | width m | batch | epochs | expected | source "
        f"| {GPU.upper()} hours |",
        "|---|---|---:|---:|---:|---:|---:|---|---|---:|",
    ]
    lines += [f"{row(path)} {hours(path)} |" for path in shipped(folder)]
    return "\n".join([*lines, "", *measured(folder)]) + "\n"


def measured(folder: Path) -> list[str]:
    """Return the small-scale measurements as a Markdown table."""
    results = {path: header(path).get("measured") for path in shipped(folder)}
    rows = [f"| {_name(path)} | {text} |" for path, text in results.items() if text]
    return ["| recipe | small-scale measurement |", "|---|---|", *rows]


def row(path: Path) -> str:
    """Return a recipe's row of the table without its hours, which take a second to compute."""
    recipe, fields = load_recipe(path), header(path)
    cost = model_cost(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    sizes = ("", "") if math.isnan(cost.omega) else (short(cost.omega), f"{cost.width:,.0f}")  # timm's have none
    cells = (
        *(_name(path), recipe.model.summary(recipe.data.image_size), f"{cost.parameters:,}", *sizes),
        *(f"{recipe.train.global_batch:,}", f"{recipe.train.epochs:,}", fields["expected"], fields["source"]),
    )
    return f"| {' | '.join(cells)} |"


def hours(path: Path) -> str:
    """Return the hours of a run on one GPU, as `widemix cost` computes them with the header's --samples."""
    samples = re.search(r"--samples (\d+)", header(path)["cost"])
    rows = estimate(load_recipe(path), Cluster(1, GPU), int(samples[1]) if samples else None)
    value = next(row.value for row in rows if row.name == "hours")
    return "under 0.01" if value < 0.01 else f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def _name(path: Path) -> str:
    return f"`{path.parent.name}/{path.name}`"


def refresh(folder: Path) -> Path:
    """Regenerate the tables in the folder's README.md, between the lines `BEGIN` and `END`; returns its path."""
    path = folder / "README.md"
    before, after = split_between(path, BEGIN, END)
    atomic_write(path, f"{before}\n{table(folder)}\n{after}")
    return path


def split_between(path: Path, begin: str, end: str) -> tuple[str, str]:
    """Return a text file up to the line `begin` and from the line `end` on; `InputError` if it does not have both."""
    try:
        before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    except OSError:
        found = rest = ""
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise InputError(f"{path}: needs the lines {begin.strip()} and {end.strip()}, in this order")
    return before + begin, end + after
