"""Exact evaluation: every sample once, on any number of ranks.

Some metrics are a mean over columns: over classes for recall, F1 and average precision, over targets for R2. A class
that no sample has, or a target that is the same for all samples, has no such value. It is left out of the mean:
counted as 0, the best predictor there can be would not reach the best metric.
"""

import functools
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torchmetrics import MeanAbsoluteError, MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.functional.classification import binary_average_precision
from torchmetrics.utilities import dim_zero_cat

from widemix.data.batches import Batch
from widemix.data.loader import EvalLoader
from widemix.distributed.topology import usual_defaults
from widemix.engine import Engine
from widemix.errors import InputError
from widemix.formats.manifest import read_manifest
from widemix.metrics import BY_CLASS, MEASURED, METRICS, PERCENT
from widemix.terminal import print

NAMED = 10  # columns without a value that a line names
Observe = Callable[[torch.Tensor, Batch], None]


def _ignore(_logits: torch.Tensor, _batch: Batch) -> None:
    pass


def evaluate_engine(
    engine: Engine,
    loader: EvalLoader,
    classes: int,
    beat: Callable[[], None] = lambda: None,
    observe: Observe = _ignore,
    by_class: bool = False,
) -> dict[str, float]:
    """Return the metrics of `evaluate` for each set of weights of the engine: "top1", and "ema_top1" with an EMA.

    With an l1 penalty there is "zero_weights" too: how many of the trained weights are zero, in %.
    Every rank calls it; `beat` is called after each batch, and `observe` as in `evaluate`, of the trained weights.
    """
    result: dict[str, float] = {}
    for prefix, weights in engine.weights().items():
        with weights:
            seen = _ignore if prefix else observe
            metrics = evaluate(engine.module, engine.evaluate_mode(), loader, classes, beat, seen, by_class)
        result |= {f"{prefix}{name}": value for name, value in metrics.items()}
    return result | ({"zero_weights": engine.zero_weights()} if engine.spec.penalty == "l1" else {})


@usual_defaults()  # torchmetrics makes its states with torch's
@torch.no_grad()  # not inference_mode: training uses the tensors that ZeRO 3 gathers here
def evaluate(
    module: nn.Module,
    precision: AbstractContextManager,
    loader: EvalLoader,
    classes: int,
    beat: Callable[[], None] = lambda: None,
    observe: Observe = _ignore,
    by_class: bool = False,
) -> dict[str, float]:
    """Return the metrics of the whole split, the same on every rank, by `data.targets`:

    - class: loss (mean cross-entropy), top1 and, with more than five classes, top5 (percent).
      Where a class has more than twice the samples of another, and with `by_class`, also balanced_accuracy and
      macro_f1 (percent): the means of recall and F1 over classes, as scikit-learn's.
    - multilabel: loss (binary cross-entropy, summed over classes) and map (percent): the mean of the average
      precision over the classes that occur.
    - regression: loss (mean squared error), mae and r2: means over targets, r2's over those that vary.

    And those that plug-ins registered for it. A line names the classes or targets that a mean is without; where it is
    without all of them the metric is left out. Every rank calls it. `precision` is the autocast context of the
    forward pass; `beat` is called after each batch, and `observe` with its logits, float32 [B, classes], and the
    batch. One sample whose loss is not finite makes the mean so too; if it is not a number, no metric is one.
    """
    device, kind = loader.topology.device, loader.data.targets
    loss = MeanMetric(nan_strategy="disable").to(device)  # the default leaves NaN out; this ignores weights
    metrics = _metrics(kind, classes, len(loader))
    if kind == "class" and (by_class or loader.is_unequal):
        metrics |= {"balanced_accuracy": BalancedAccuracy(classes), "macro_f1": MacroF1(classes)}
    metrics |= {name: build(classes) for name in MEASURED[kind] if (build := METRICS[name].build)}
    metrics = {name: metric.to(device) for name, metric in metrics.items()}
    was_training = module.training
    module.eval()
    with loader.batches() as batches, precision:
        for batch in batches:
            # Of an empty batch on one rank sharded engines need the call, and many networks need a sample.
            inputs = batch.inputs if len(batch) else batch.inputs.new_zeros(1, *batch.inputs.shape[1:])
            logits = module(inputs).float()[: len(batch)]
            beat()
            if len(batch):
                loss.update(_losses(kind, logits, batch.targets))
                observe(logits, batch)
            for metric in metrics.values():
                _update(kind, metric, logits, batch.targets)
    module.train(was_training)
    result = {"loss": loss.compute().item()}
    for name, metric in metrics.items():
        value = metric.compute().item()
        undefined = metric.undefined if isinstance(metric, MacroMean) else ()
        if undefined and loader.topology.is_main:
            _name_undefined(name, undefined, classes, Path(loader.data.path), loader.data.eval_split)
        if math.isnan(result["loss"]):
            value = math.nan  # torchmetrics ranks NaN among the logits, or scores, as if it were a number
        if len(undefined) < classes:
            result[name] = value * (100 if METRICS[name].form == PERCENT else 1)
    return result


@functools.cache  # once, not after each epoch
def _name_undefined(name: str, undefined: tuple[int, ...], columns: int, folder: Path, split: str) -> None:
    known = read_manifest(folder).classes
    title, counted, none = METRICS[name].title, *_REASONS[name]
    if len(undefined) == columns:
        text = f"{none}: it has no {title}"
    else:
        names = [known[column] if column < len(known) else str(column) for column in undefined[:NAMED]]
        more = f" and {len(undefined) - NAMED} more" if len(undefined) > NAMED else ""
        over = f"{columns - len(undefined)} of {columns} {counted}"
        text = f"{title} is the mean over the {over}, without {', '.join(names)}{more}"
    print(f"{folder}: split {split!r}: {text}", file=sys.stderr)


def _metrics(kind: str, outputs: int, samples: int) -> dict[str, Metric]:
    """The metrics of each kind of `data.targets`; those of numbers sum in float64."""
    if kind == "class":
        ranks = (1, 5) if outputs > 5 else (1,)
        return {f"top{k}": MulticlassAccuracy(outputs, top_k=k, average="micro") for k in ranks}
    if kind == "multilabel":
        return {"map": AveragePrecision()}
    if samples < 2:
        raise InputError("data.eval_split has one sample, and R2 needs two; name another split")
    return {"mae": MeanAbsoluteError().set_dtype(torch.float64), "r2": R2(outputs)}


# By metric: the columns that have a value, and that none has.
_REASONS = dict.fromkeys(("map", *BY_CLASS), ("classes that occur", "no class occurs"))
_REASONS["r2"] = ("targets that vary", "no target varies")


def _losses(kind: str, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of each sample: float32 [B]."""
    if kind == "class":
        return cross_entropy(logits, targets, reduction="none")
    if kind == "multilabel":
        return binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=-1)
    return mse_loss(logits, targets, reduction="none").mean(dim=-1)


def _update(kind: str, metric: Metric, logits: torch.Tensor, targets: torch.Tensor) -> None:
    if kind == "multilabel":  # also with an empty batch: ranks exchange scores, and each must have some tensor
        metric.update(logits.double().sigmoid(), targets.long())  # in float32, many would be rounded to 1
    elif len(targets):
        metric.update(*((logits, targets) if kind == "class" else (logits.double(), targets.double())))


class MacroMean(Metric):
    """A mean over columns, computed by all ranks together; nan where no column has a value."""

    undefined: tuple[int, ...] = ()  # columns without a value, known after `compute`

    def compute(self) -> Tensor:
        """Return the mean, float64 []."""
        values = self.values()
        self.undefined = tuple(values.isnan().nonzero().flatten().tolist())
        return values[~values.isnan()].mean()

    def values(self) -> Tensor:
        """Return the value of each column, float64 [N]; nan where it has none."""
        raise NotImplementedError


class ClassCounts(MacroMean):
    """A mean over classes of what follows from these counts of each: none for a class that would be 0 / 0."""

    def __init__(self, classes: int):
        super().__init__()
        self.samples: Tensor
        self.predicted: Tensor
        self.correct: Tensor
        for name in ("samples", "predicted", "correct"):
            self.add_state(name, torch.zeros(classes, dtype=torch.float64, device="cpu"), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits [B, classes], labels int64 [B]."""
        guesses = logits.argmax(1)
        for state, column in (
            (self.samples, labels),
            (self.predicted, guesses),
            (self.correct, labels[guesses == labels]),
        ):
            state += column.bincount(minlength=len(state))


class BalancedAccuracy(ClassCounts):
    """The fraction of a class's samples that are predicted so."""

    def values(self) -> Tensor:
        """Return the recall of each class; none of one that no sample has."""
        return self.correct / self.samples


class MacroF1(ClassCounts):
    """The harmonic mean of a class's recall and precision."""

    def values(self) -> Tensor:
        """Return F1 of each class; none of one that no sample has, and none is predicted to have."""
        return 2 * self.correct / (self.samples + self.predicted)


class AveragePrecision(MacroMean):
    """Average precision by class; none for a class that no sample has."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor]
        self.targets: list[Tensor]
        for name in ("scores", "targets"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, scores: Tensor, targets: Tensor) -> None:
        """Add a batch, empty ones too: scores float64 [B, N]; 0 or 1, int64 [B, N]."""
        self.scores.append(scores)
        self.targets.append(targets)

    def values(self) -> Tensor:
        """Return the average precision of each class."""
        columns = zip(dim_zero_cat(self.scores).T, dim_zero_cat(self.targets).T, strict=True)
        values = [
            binary_average_precision(scores, targets, validate_args=False)
            if targets.any()
            else scores.new_tensor(torch.nan)
            for scores, targets in columns
        ]
        return torch.stack(values)


class R2(MacroMean):
    """The coefficient of determination by target; none for a target that does not vary."""

    def __init__(self, targets: int):
        super().__init__()
        self.moments: Tensor
        # Count, mean, sum of squared deviations from it, sum of squared errors, lowest, highest.
        empty = torch.tensor([0, 0, 0, 0, torch.inf, -torch.inf], dtype=torch.float64, device="cpu")
        self.add_state("moments", empty.repeat(targets, 1).T, dist_reduce_fx=_merged)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch that is not empty: float64 [B, N]."""
        mean = targets.mean(0)
        spread, errors = (targets - mean).square().sum(0), (outputs - targets).square().sum(0)
        count, ends = torch.full_like(mean, len(targets)), (targets.amin(0), targets.amax(0))
        self.moments = _merged(torch.stack([self.moments, torch.stack([count, mean, spread, errors, *ends])]))

    def values(self) -> Tensor:
        """Return R2 of each target; minus infinity where an output is not finite."""
        _, _, spread, errors, lowest, highest = self.moments
        errors = errors.nan_to_num(nan=torch.inf, posinf=torch.inf)
        return torch.where(highest > lowest, 1 - errors / spread, torch.nan)


def _merged(parts: Tensor) -> Tensor:
    """The moments of parts of a sample together (Chan et al. 1979): [P, 6, N] -> [6, N]."""
    count, mean, spread, errors, lowest, highest = parts.unbind(1)
    total = count.sum(0)
    centre = (count * mean).sum(0) / total.clamp(min=1)
    spread = spread + count * (mean - centre).square()
    return torch.stack([total, centre, spread.sum(0), errors.sum(0), lowest.amin(0), highest.amax(0)])
