"""The style of all figures: one size of type, colours that colour-blind readers can tell apart, no frames."""

import io
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter

from widemix.files import atomic_write

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
    "svg.hashsalt": "widemix",  # the same figure gives the same file
}
DPI = 150
_HASH = re.compile(r"_[0-9a-f]{10}$")
# Decorator of functions that plot. Nothing of a matplotlibrc, which matplotlib also takes from the current folder, a
# stranger's perhaps: with text.usetex it would run LaTeX.
styled = mpl.rc_context({name: mpl.rcParamsDefault[name] for name in {*mpl.rcParamsDefault} - {"backend"}} | STYLE)


def new_figure(width: float, height: float, columns: int = 1, rows: int = 1, **options) -> tuple[Figure, Any]:
    """Return a figure of this size in inches and its axes, as `matplotlib.pyplot.subplots` does, but without pyplot.

    With more than one row or column the axes are an array.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


@styled
def as_png(figure: Figure) -> bytes:
    """Return the figure as a PNG file."""
    return _as_file(figure, "png")


@styled
def save(figure: Figure, paths: Sequence[Path]) -> None:
    """Write a figure into files, each in the format of its suffix; the same figure, the same bytes."""
    for path in paths:
        atomic_write(path, _as_file(figure, path.suffix[1:]))


def _as_file(figure: Figure, suffix: str) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # it is shown as a box
        figure.savefig(buffer, format=suffix, dpi=DPI, metadata={"Date": None} if suffix == "svg" else None)
    return buffer.getvalue()


def log_axis(axes: Axes, name: Literal["x", "y"]) -> None:
    """Make one of the axes logarithmic, once all is plotted; within three decades with ticks that read as numbers."""
    set_scale, axis = (axes.set_xscale, axes.xaxis) if name == "x" else (axes.set_yscale, axes.yaxis)
    set_scale("log")
    low, high = axis.get_view_interval()
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if high > 10 * low else (1, 2, 3, 4, 6, 8)
    ticks = [tick for power in powers for digit in digits if low <= (tick := digit * 10.0**power) <= high]
    if len(ticks) > 1 and high < 1000 * low and low >= 1e-3 and high < 1e6:
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter(NullFormatter())


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
    """Return a network's name without folders: runs/a -> a, runs/a/checkpoints/00000100 -> a step 100.

    Nor with the hash that ends the name of a study's run.
    """
    path = Path(network)
    if path.parent.name == "checkpoints" and path.name.isdecimal():
        return literal(f"{_HASH.sub('', path.parent.parent.name)} step {int(path.name)}")
    return literal(path.stem if path.suffix in (".yaml", ".yml") else _HASH.sub("", path.name))


def literal(name: str) -> str:
    """Return a name as matplotlib shows it letter by letter: between two dollar signs it reads mathematics.

    Bytes that are not UTF-8, as a folder's name may have, become question marks.
    """
    return name.encode("utf-8", "replace").decode().replace("$", r"\$")
