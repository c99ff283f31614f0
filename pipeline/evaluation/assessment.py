"""Evaluation of any network, trained here or not: accuracy, and on request by class, confusions and calibration."""

import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix

from widemix.data.batches import Batch
from widemix.data.loader import EvalLoader, check_model
from widemix.data.precision import DTYPES, autocast
from widemix.distributed.topology import (
    process_group,
    read_topology,
    set_matmul_precision,
    set_torch_threads,
    usual_defaults,
)
from widemix.errors import InputError
from widemix.evaluation.evaluate import evaluate
from widemix.evaluation.networks import Network, load_network
from widemix.evaluation.real_labels import RealAccuracy, read_real_labels
from widemix.formats.manifest import find_trained_on, read_manifest
from widemix.metrics import all_metrics
from widemix.progress_line import ProgressLine
from widemix.run import checkpoint
from widemix.run.records import record_evaluation
from widemix.terminal import print

BINS = 15  # of confidence, of equal width: the usual number for ECE
BATCH, TIMEOUT_S = 128, 1800  # where there is no recipe


@dataclass(frozen=True)
class Details:
    """Added by `--details`: `confusion` int [true class, predicted class], and the bins of confidence."""

    confusion: list[list[int]]
    per_class: list[float | None]  # top-1 in percent; None for a class without samples
    bins: list[dict[str, Any]]  # `samples`, and of them the mean `confidence` and `accuracy` in 0 to 1
    ece: float  # expected calibration error, 0 to 1


@dataclass(frozen=True)
class Assessment:
    """Metrics of a network on a split. `step` is None for a network that is not a checkpoint."""

    network: str
    data: str
    split: str
    samples: int
    step: int | None
    metrics: dict[str, float]  # as `evaluate` gives them; of ReaL real_top1 and real_samples
    classes: list[str]
    details: Details | None = None  # none of outputs that are NaN

    def sentence(self) -> str:
        """Return the metrics as a sentence."""
        metrics, step = self.metrics, "" if self.step is None else f" at step {self.step}"
        accuracy = all_metrics(metrics)
        if "real_top1" in metrics:
            accuracy += (
                f", ReaL top-1 {metrics['real_top1']:.2f} % of {metrics['real_samples']:.0f} samples with labels"
            )
        return f"{self.network}{step} on {self.samples} samples of split {self.split!r} of {self.data}: {accuracy}"


class Calibration(Metric):
    """Sums of confidence and of correct predictions over `BINS` bins of confidence, over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: Tensor
        self.confidence: Tensor
        self.correct: Tensor
        for name in ("samples", "confidence", "correct"):
            self.add_state(name, torch.zeros(BINS, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits [B, classes], labels int64 [B]."""
        confidence, predicted = logits.double().softmax(1).max(1)
        place = (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1)  # bins are open below, closed above
        for state, values in (
            (self.samples, torch.ones_like(confidence)),
            (self.confidence, confidence),
            (self.correct, (predicted == labels).double()),
        ):
            state.index_add_(0, place, values)

    def compute(self) -> Tensor:
        """Return the three sums, float64 [3, BINS]."""
        return torch.stack([self.samples, self.confidence, self.correct])


class SelectClasses(nn.Module):
    """A network whose logits are those of some classes, in another order."""

    def __init__(self, network: nn.Module, classes: Sequence[int]):
        super().__init__()
        self.network, self.classes = network, list(classes)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs of the network -> logits [B, len(classes)]."""
        return self.network(x)[:, self.classes]


def match_classes(network: Network, folder: Path) -> list[int] | None:
    """Return which of the network's classes each class of the prepared folder is; None if they are the same.

    ImageNet-A and -R have 200 of ImageNet's classes: the others are left out of the prediction, as is usual there.
    Names that are all numbers, as ImageNet-V2's, number the network's classes, unless it has such names itself.
    `InputError` if the folder has a class that the network has not, or that either has twice. Unknown names are taken
    to be the same.
    """
    classes = read_manifest(folder).classes
    if not network.classes or not classes or classes == network.classes:
        return None
    known = network.classes
    if not set(known).intersection(classes) and all(name.isdecimal() for name in classes):
        known = tuple(map(str, range(len(known))))
    place = {name: number for number, name in enumerate(known)}
    strange = [name for name in classes if name not in place]
    if strange:
        some = ", ".join(network.classes[:3])
        raise InputError(
            f"{folder}: has a class {strange[0]!r}; {network.name} was trained with {some}, ...; "
            "prepare the data with the same names of class folders"
        )
    for owner, counts in ((folder, Counter(classes)), (network.name, Counter(known))):
        twice = [name for name in classes if counts[name] > 1]
        if twice:
            raise InputError(f"{owner}: has two classes {twice[0]!r}, so that names cannot match them")
    return [place[name] for name in classes]


@usual_defaults()
def assess(
    name: str,
    data: Path | None = None,
    split: str | None = None,
    batch: int | None = None,
    ema: bool = False,
    details: bool = False,
    real: Path | None = None,
) -> Assessment:
    """Evaluate a network, one of `names.FORMS`, on a whole split. Every rank calls it.

    Prepared folder, split and batch size are by default those of its recipe. real: file of ReaL labels. What is
    measured of a run's checkpoint becomes a line of the run's evaluations.jsonl.
    """
    found = assess_network(load_network(name, ema), data, split, batch, details, real)
    if found.step is not None and read_topology().is_main:
        line = {"step": found.step, "ema": ema, "data": found.data, "split": found.split, "samples": found.samples}
        problem = record_evaluation(checkpoint.find(Path(name)).path, {**line, "time": time.time(), **found.metrics})
        if problem:
            print(f"warning: {problem}", file=sys.stderr)
    return found


@usual_defaults()
def assess_network(
    network: Network,
    data: Path | None = None,
    split: str | None = None,
    batch: int | None = None,
    details: bool = False,
    real: Path | None = None,
) -> Assessment:
    """`assess` of a network that is loaded already."""
    if batch is not None and batch < 1:
        raise InputError(f"--batch {batch}: must be at least 1")
    folder = str(data or network.data.path)
    if not folder:
        raise InputError(f"{network.name}: has no data of its own: give a prepared folder with --data")
    if network.recipe and not data:
        find_trained_on(folder, network.name)
    chosen = match_classes(network, Path(folder))
    module = SelectClasses(network.module, chosen) if chosen else network.module
    number = len(chosen) if chosen else network.data.num_classes
    if number == 1 and network.data.targets == "class":
        only = ", ".join(map(repr, read_manifest(Path(folder)).classes[:1]))
        raise InputError(f"{folder}: has one class, {only}, and of one every prediction is right")
    section = network.data.model_copy(
        update={"path": folder, "eval_split": split or network.data.eval_split, "num_classes": number}
    )
    if (details or real) and section.targets != "class":
        raise InputError(f"--{'details' if details else 'real'}: is for classes, data.targets is {section.targets}")
    recipe, topology = network.recipe, read_topology()
    with process_group(topology, recipe.engine.timeout_s if recipe else TIMEOUT_S):
        set_torch_threads(topology)
        if recipe:
            set_matmul_precision(recipe.train.matmul_precision)
        dtype = DTYPES[recipe.train.precision if recipe else "fp32"]
        loader = EvalLoader(section, batch or (recipe.eval.batch_size if recipe else BATCH), topology, dtype)
        if network.section:
            check_model(network.section, loader)
        device = topology.device
        detail_metrics = [MulticlassConfusionMatrix(number).to(device), Calibration().to(device)] if details else []
        names = list(read_manifest(Path(folder)).classes)
        by_sample = []
        if real:
            beton = Path(loader.source.file.path)
            by_sample.append(RealAccuracy(read_real_labels(real, beton, len(names))).to(device))

        progress = ProgressLine("samples evaluated", len(loader), enabled=topology.is_main)

        def observe(logits: Tensor, batch: Batch) -> None:
            progress.add(topology.world * len(batch))
            for metric in detail_metrics:
                metric.update(logits, batch.targets)
            for metric in by_sample:
                metric.update(logits, batch.samples)

        with progress:
            metrics = evaluate(module.to(device), autocast(device, dtype), loader, number, observe=observe)
        numbers = not math.isnan(metrics["loss"])  # a NaN would be ranked among the logits as if it were one
        counts = [metric.compute().cpu() for metric in detail_metrics]
        found = details_of(*counts) if details and numbers else None
        for metric in by_sample:
            correct, counted = metric.compute().tolist()
            metrics |= {"real_top1": 100 * correct / counted if numbers else math.nan, "real_samples": counted}
    return Assessment(network.name, folder, section.eval_split, len(loader), network.step, metrics, names, found)


def details_of(confusion: Tensor, bins: Tensor) -> Details:
    """Return the details of counts [true class, predicted class] and of the sums of `Calibration`."""
    totals = confusion.sum(1).tolist()
    correct = confusion.diagonal().tolist()
    per_class = [100 * right / total if total else None for right, total in zip(correct, totals, strict=True)]
    samples, confidence, accuracy = bins.tolist()
    entries = [
        {"samples": int(n), "confidence": sure / n if n else None, "accuracy": right / n if n else None}
        for n, sure, right in zip(samples, confidence, accuracy, strict=True)
    ]
    ece = (bins[1] - bins[2]).abs().sum().item() / bins[0].sum().item()
    return Details(confusion.tolist(), per_class, entries, ece)
