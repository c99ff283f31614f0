"""The metrics of an evaluation, by what is predicted, and how they are printed."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from widemix.arguments import Name, check_arguments
from widemix.errors import InputError

if TYPE_CHECKING:
    import torchmetrics


class Metric(NamedTuple):
    """A metric of an evaluation.

    build: of a registered one: given the number of outputs N, returns the torchmetrics.Metric whose value it is,
        computed by all ranks together. Its `update` gets logits float32 [B, N] and labels int64 [B] where
        `data.targets` is class; probabilities float64 and 0 or 1 int64 [B, N] where it is multilabel; outputs and
        targets float64 [B, N] where it is regression.
    """

    title: str
    form: str  # of its value, for `format`; with PERCENT the value is 100 times the metric's
    higher: bool  # whether higher is better
    build: "Callable[[int], torchmetrics.Metric] | None" = None


PERCENT = "{:.2f} %"
METRICS = {
    "top1": Metric("top-1", PERCENT, True),
    "top5": Metric("top-5", PERCENT, True),
    "balanced_accuracy": Metric("balanced accuracy", PERCENT, True),
    "macro_f1": Metric("macro F1", PERCENT, True),
    "map": Metric("mAP", PERCENT, True),
    "mae": Metric("MAE", "{:.4g}", False),
    "r2": Metric("R2", "{:.4f}", True),
    "loss": Metric("loss", "{:.4f}", False),
}
BY_CLASS = ("balanced_accuracy", "macro_f1")  # measured where classes are unequal
# Those of each kind of `data.targets`, the most telling first; each has the loss too.
MEASURED = {"class": ("top1", "top5", *BY_CLASS), "multilabel": ("map",), "regression": ("mae", "r2")}


@check_arguments
def register_metric(
    name: Name, metric: Metric, targets: Literal["class", "multilabel", "regression"] = "class"
) -> None:
    """Add a metric to all evaluations of a kind of `data.targets`; `InputError` if the name is taken."""
    if metric.build is None:
        raise InputError("metric: has no build, the function that makes its metric")
    if name in METRICS:
        raise InputError(f"metric {name} is already registered")
    loss = METRICS.pop("loss")
    METRICS.update({name: metric, "loss": loss})  # which is named last
    MEASURED[targets] += (name,)


def show_metric(name: str, value: float) -> str:
    """A metric with its title, such as `top-1 91.20 %`; with the prefix ema_ that of the averaged weights."""
    known, average = METRICS[name.removeprefix("ema_")], name.startswith("ema_")
    return f"{known.title} {known.form.format(value)}" + (" of the averaged weights" if average else "")


def metric_heading(name: str) -> str:
    """The heading of a column of such metrics, with their unit."""
    return METRICS[name].title + (" %" if METRICS[name].form == PERCENT else "")


def metric_cell(name: str, value: float) -> str:
    """A metric below its heading, without a unit."""
    return METRICS[name].form.removesuffix(" %").format(value)


def main_metric(metrics: Mapping[str, Any]) -> str:
    """The most telling of an evaluation's metrics that is finite, with its title."""
    name = next((name for name in METRICS if metrics.get(name) is not None), None)
    return show_metric(name, metrics[name]) if name else "no finite metric"


def all_metrics(metrics: Mapping[str, Any]) -> str:
    """All of an evaluation's metrics with their titles, the loss last."""
    return ", ".join(show_metric(name, metrics[name]) for name in METRICS if name in metrics)
