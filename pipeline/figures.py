"""The figures of an evaluation, by what is predicted, and how they are printed."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """A figure of an evaluation."""

    title: str
    form: str  # of its value, for `format`
    higher: bool  # whether higher is better


PERCENT = "{:.2f} %"
FIGURES = {
    "top1": Figure("top-1", PERCENT, True),
    "top5": Figure("top-5", PERCENT, True),
    "map": Figure("mAP", PERCENT, True),
    "mae": Figure("MAE", "{:.4g}", False),
    "r2": Figure("R2", "{:.4f}", True),
    "loss": Figure("loss", "{:.4f}", False),
}
# Those of each kind of `data.targets`, the most telling first; each has the loss too.
MEASURED = {"class": ("top1", "top5"), "multilabel": ("map",), "regression": ("mae", "r2")}


def show_figure(name: str, value: float) -> str:
    """A figure with its title, such as `top-1 91.20 %`."""
    return f"{FIGURES[name].title} {FIGURES[name].form.format(value)}"


def figure_heading(name: str) -> str:
    """The heading of a column of such figures, with their unit."""
    return FIGURES[name].title + (" %" if FIGURES[name].form == PERCENT else "")


def figure_cell(name: str, value: float) -> str:
    """A figure below its heading, without a unit."""
    return FIGURES[name].form.removesuffix(" %").format(value)


def main_figure(figures: Mapping[str, Any]) -> str:
    """The most telling of an evaluation's figures, with its title."""
    name = next(name for name in FIGURES if name in figures)
    return show_figure(name, figures[name])


def all_figures(figures: Mapping[str, Any]) -> str:
    """All of an evaluation's figures with their titles, the loss last."""
    return ", ".join(show_figure(name, figures[name]) for name in FIGURES if name in figures)
