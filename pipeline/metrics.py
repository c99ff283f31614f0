"""The figures of an evaluation, by what is predicted, and how they are printed."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from widemix.arguments import Name, check_arguments
from widemix.errors import InputError

if TYPE_CHECKING:
    from torchmetrics import Metric


class Figure(NamedTuple):
    """A figure of an evaluation.

    build: of a registered one: given the number of outputs N, returns the torchmetrics.Metric whose value it is,
        computed by all ranks together. Its `update` gets logits float32 [B, N] and labels int64 [B] where
        `data.targets` is class; probabilities float64 and 0 or 1 int64 [B, N] where it is multilabel; outputs and
        targets float64 [B, N] where it is regression.
    """

    title: str
    form: str  # of its value, for `format`; with PERCENT the value is 100 times the metric's
    higher: bool  # whether higher is better
    build: "Callable[[int], Metric] | None" = None


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


@check_arguments
def register_figure(
    name: Name, figure: Figure, targets: Literal["class", "multilabel", "regression"] = "class"
) -> None:
    """Add a figure to all evaluations of a kind of `data.targets`; `InputError` if the name is taken."""
    if figure.build is None:
        raise InputError("figure: has no build, the function that makes its metric")
    if name in FIGURES:
        raise InputError(f"figure {name} is already registered")
    loss = FIGURES.pop("loss")
    FIGURES.update({name: figure, "loss": loss})  # which is named last
    MEASURED[targets] += (name,)


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
