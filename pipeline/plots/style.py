"""The style of all figures: one size of type, colours that colour-blind readers can tell apart, no frames."""

import io
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from widemix.errors import InputError
from widemix.files import atomic_write
from widemix.run import checkpoint
from widemix.run.lock import hold

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe & Ito 2008
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
}
DPI = 150
styled = mpl.rc_context(STYLE)  # decorator of functions that plot


def new_figure(width: float, height: float, columns: int = 1, rows: int = 1, **options) -> tuple[Figure, Any]:
    """Return a figure of this size in inches and its axes, as `matplotlib.pyplot.subplots` does, but without pyplot.

    With more than one row or column the axes are an array.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def as_png(figure: Figure) -> bytes:
    """Return the figure as a PNG file."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # it is shown as a box
        figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def save(figure: Any, paths: Sequence[Path]) -> None:
    """Write a figure of matplotlib into files, each in the format of its suffix; the same figure, the same bytes."""
    for path in paths:
        buffer = io.BytesIO()
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(buffer, format=path.suffix[1:], dpi=150, metadata=metadata)
        atomic_write(path, buffer.getvalue())


def add_to_tensorboard(images: Mapping[str, bytes], run: Path) -> Path:
    """Add PNG files as `analysis/NAME` at a run's newest step; returns the folder of its event files.

    They replace those of the same name and step, but not while the run is trained: its own file is left alone.
    """
    from widemix.run.tensorboard import Board

    try:
        step = checkpoint.find(run).position.step
    except InputError:  # it has no checkpoint yet
        step = 0
    tags = {
        f"analysis/{name}": np.asarray(Image.open(io.BytesIO(png)).convert("RGB")) for name, png in images.items()
    }
    with ExitStack() as stack:
        dropped = None
        with suppress(InputError):
            stack.enter_context(hold(run, wait_s=0))
            dropped = lambda tag, at: tag in tags and at == step  # noqa: E731
        board = stack.enter_context(closing(Board(run, dropped)))
        for tag, pixels in tags.items():
            board.add_image(tag, pixels, step)
    return run


def heat_map(axes: Axes, values: np.ndarray, names: tuple[Sequence[str], Sequence[str]], label: str) -> None:
    """Plot values within [0, 1] as a matrix [vertical, horizontal], the first row at the bottom; nan is grey.

    `names` are those of the columns and of the rows.
    """
    colors = mpl.colormaps["viridis"].with_extremes(bad="0.8")
    image = axes.imshow(values, origin="lower", vmin=0, vmax=1, cmap=colors, aspect="equal")
    columns, rows = names
    axes.set_xticks(range(len(columns)), columns, rotation=90 if max(map(len, columns)) > 2 else 0)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.figure.colorbar(image, ax=axes, label=label, shrink=0.8)


def short_names(names: Sequence[str]) -> list[str]:
    """Return names without the part that all begin with: blocks.0.mlp, blocks.1.mlp -> 0.mlp, 1.mlp."""
    first, last = min(names), max(names)  # in alphabetical order these two differ earliest
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    cut = first.rfind(".", 0, shared) + 1
    return [name[cut:] for name in names]


def label(network: str) -> str:
    """Return a network's name without folders: runs/a -> a, runs/a/checkpoints/00000100 -> a step 100."""
    path = Path(network)
    if path.parent.name == "checkpoints" and path.name.isdecimal():
        return literal(f"{path.parent.parent.name} step {int(path.name)}")
    return literal(path.stem if path.suffix in (".yaml", ".yml") else path.name)


def literal(name: str) -> str:
    """Return a name as matplotlib shows it letter by letter: between two dollar signs it reads mathematics."""
    return name.replace("$", r"\$")
