"""What a study's finished cells reached: a table, and a figure of accuracy over width or depth to width."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import InputError
from pipeline.files import atomic_write
from pipeline.models.cost import model_cost
from pipeline.recipe import Recipe, load_recipe
from pipeline.recipe.model import MixerSection
from pipeline.recipe.text import TextSection
from pipeline.studies.plan import Cell

LABELS = {"width": "effective width m", "depth_to_width": "depth / log2 width (p / log2 d)"}


@dataclass(frozen=True)
class Point:
    """A finished cell."""

    cell: Cell
    parameters: int
    x: float
    top1: float  # percent, of the evaluation at the end
    loss: float
    epochs: int
    seconds: float


def collect(cells: Sequence[Cell], folder: Path) -> list[Point]:
    """The finished cells, from their run folders alone; `InputError` if there are none,."""
    points = [_point(cell, folder / cell.name) for cell in cells if (folder / cell.name / "done.json").exists()]
    if not points:
        raise InputError(f"{folder}: none of the study's {len(cells)} cells is finished there")
    return points


def _point(cell: Cell, run: Path) -> Point:
    try:
        done, recipe = json.loads((run / "done.json").read_text()), load_recipe(run / "recipe.yaml")
        top1, loss, seconds = (float(done[name]) for name in ("top1", "loss", "seconds"))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{run}: is no finished run ({error})") from None
    cost = model_cost(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    x = cost.width if cell.across == "width" else _depth_to_width(recipe)
    return Point(cell, cost.parameters, x, top1, loss, recipe.train.epochs, seconds)


def _depth_to_width(recipe: Recipe) -> float:
    """p / log2 d, over which Navon & Bronstein 2023 look for the best depth at a budget of weights."""
    section = recipe.model
    if isinstance(section, TextSection):
        return section.depth / math.log2(section.width)
    if isinstance(section, MixerSection):
        return section.depth / math.log2(section.channels)
    raise InputError(f"across: depth_to_width: a model of kind {section.kind} has none")


def write_report(points: Sequence[Point], folder: Path) -> list[Path]:
    """report.md and report.png in the study's folder."""
    table, figure = folder / "report.md", folder / "report.png"
    atomic_write(table, as_markdown(points))
    draw(points, figure)
    return [table, figure]


def as_markdown(points: Sequence[Point]) -> str:
    """A row a cell, in the study's order."""
    lines = [
        f"| cell | parameters | {LABELS[points[0].cell.across]} | epochs | top-1 % | loss | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {p.cell.name} | {p.parameters:,} | {p.x:,.5g} | {p.epochs:,} "
        f"| {p.top1:.2f} | {p.loss:.4f} | {p.seconds:,.0f} |"
        for p in points
    ]
    return "\n".join(lines) + "\n"


def draw(points: Sequence[Point], path: Path) -> None:
    """Top-1 over x, a line for each that the study tells apart."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for line in dict.fromkeys(point.cell.line for point in points):
        found = sorted((point.x, point.top1) for point in points if point.cell.line == line)
        axes.plot([x for x, _ in found], [top1 for _, top1 in found], marker="o", label=line)
    if points[0].cell.across == "width":
        axes.set_xscale("log", base=2)
    axes.set(xlabel=LABELS[points[0].cell.across], ylabel="top-1 %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path.with_name(f".{path.name}"), format="png", dpi=120)
    plt.close(figure)
    path.with_name(f".{path.name}").replace(path)
