"""Results of a study: a table of its finished cells, and a figure of accuracy over width or depth to width."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import InputError
from pipeline.files import atomic_write
from pipeline.models.cost import model_cost
from pipeline.recipe import Recipe, load_recipe
from pipeline.studies.cell import Cell

LABELS = {"width": "effective width m", "depth_to_width": "depth / log2 width (p / log2 d)"}


@dataclass(frozen=True)
class Point:
    """A finished cell: its cost and its final evaluation."""

    cell: Cell
    parameters: int
    x: float
    top1: float  # percent
    loss: float
    epochs: int
    seconds: float


def collect(cells: Sequence[Cell], folder: Path) -> list[Point]:
    """Read the results of the finished cells from their run folders; raises `InputError` if there are none."""
    points = [_point(cell, folder / cell.name) for cell in cells if cell.has_result(folder)]
    if not points:
        raise InputError(f"{folder}: none of the study's {len(cells)} cells is finished there")
    return points


def _point(cell: Cell, run: Path) -> Point:
    try:
        done, recipe = json.loads((run / "done.json").read_text()), load_recipe(run / "recipe.yaml")
        top1, loss, seconds = (float(done[name]) for name in ("top1", "loss", "seconds"))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{run}: is not a finished run ({error})") from None
    cost = model_cost(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    x = cost.width if cell.across == "width" else _depth_to_width(recipe)
    return Point(cell, cost.parameters, x, top1, loss, recipe.train.epochs, seconds)


def _depth_to_width(recipe: Recipe) -> float:
    """Depth over log2 of the width, p / log2 d: the x axis of Navon & Bronstein 2023."""
    ratio = recipe.model.depth_to_width()
    if ratio is None:
        raise InputError(f"across: depth_to_width: a model of kind {recipe.model.kind} has no such ratio")
    return ratio


def write_report(points: Sequence[Point], folder: Path) -> list[Path]:
    """Write report.md and report.png into the study's folder; returns their paths."""
    table, figure = folder / "report.md", folder / "report.png"
    atomic_write(table, as_markdown(points))
    draw(points, figure)
    return [table, figure]


def as_markdown(points: Sequence[Point]) -> str:
    """Return the Markdown table, one row a cell, in the study's order."""
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
    """Draw top-1 over x, one line for each `Cell.line`, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for line in dict.fromkeys(point.cell.line for point in points):
        curve = sorted((point.x, point.top1) for point in points if point.cell.line == line)
        axes.plot([x for x, _ in curve], [top1 for _, top1 in curve], marker="o", label=line)
    if points[0].cell.across == "width":
        axes.set_xscale("log", base=2)
    axes.set(xlabel=LABELS[points[0].cell.across], ylabel="top-1 %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    plt.close(figure)
    atomic_write(path, buffer.getvalue())
