"""CKA between the layers of two networks over a prepared split: `widemix analyse cka`."""

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from widemix.analysis.cka import (
    MinibatchCka,
    centered_kernel,
    diagonal_mean,
    layer_features,
    layers_before_skips,
    layers_by_pattern,
    random_samples,
)
from widemix.data.loader import EvalLoader
from widemix.distributed.topology import read_topology
from widemix.errors import InputError
from widemix.evaluation.networks import Network
from widemix.files import csv_text
from widemix.formats.manifest import read_manifest
from widemix.models.cost import model_cost
from widemix.plots.style import COLORS, heat_map, label, new_figure, short_names, styled
from widemix.progress_line import ProgressLine
from widemix.recipe.data import AnyDataSection, DataSection


@dataclass(frozen=True)
class Samples:
    """Which samples to compare on: a prepared folder and split (None: the first network's), and how many."""

    data: Path | None = None
    split: str | None = None
    batch: int = 256  # n, of a mini-batch
    most: int | None = None  # None: all
    seed: int = 0  # of their order


@dataclass(frozen=True)
class Similarity:
    """CKA of each layer of one network (rows) with each layer of another (columns)."""

    row_network: str
    column_network: str
    rows: list[str]
    columns: list[str]
    values: np.ndarray  # float64 [rows, columns]
    samples: int
    batch: int
    sparsity: float | None  # 1/p of the second network, where the cost formulas give p
    row_sparsity: float | None  # and of the first

    def as_json(self) -> dict[str, Any]:
        """Return what --json writes; nan, where a layer is constant, becomes null."""
        values = [[None if math.isnan(value) else value for value in row] for row in self.values.tolist()]
        mean = diagonal_mean(self.values)
        return {
            "row_network": self.row_network,
            "column_network": self.column_network,
            "rows": self.rows,
            "columns": self.columns,
            "values": values,
            "diagonal_mean": None if mean is None or math.isnan(mean) else mean,
            "samples": self.samples,
            "batch": self.batch,
            "inverse_density": self.sparsity,
            "row_inverse_density": self.row_sparsity,
        }


@torch.no_grad()
def compare_each(
    firsts: Sequence[Network],
    second: Network,
    samples: Samples,
    row_layers: Sequence[str] = (),
    column_layers: Sequence[str] = (),
) -> list[Similarity]:
    """Return CKA between named layers of each first network and the second, by default those before skip connections.

    From one pass over the samples, at least `LEAST` in a batch, which each network reads with its own preprocessing.
    Layers are patterns such as `blocks.*.norm1`. On the GPU if there is one.
    """
    topology, networks = read_topology(), [*firsts, second]
    sections = [inputs_section(network, firsts[0].data, samples) for network in networks]
    count = len(EvalLoader(sections[0], samples.batch, topology))
    chosen = random_samples(count, samples.most, samples.batch, samples.seed)
    distinct = [section for number, section in enumerate(sections) if section not in sections[:number]]
    modules = [network.module.to(topology.device) for network in networks]
    patterns = [row_layers] * len(firsts) + [column_layers]
    names = [
        layers_by_pattern(module, own) if own else layers_before_skips(module)
        for module, own in zip(modules, patterns, strict=True)
    ]
    totals = [MinibatchCka() for _ in firsts]
    with ExitStack() as stack:
        progress = stack.enter_context(ProgressLine(f"{second.name}: samples compared", samples.most or count))
        loaders = [EvalLoader(section, samples.batch, topology, samples=chosen) for section in distinct]
        for batches in zip(*(stack.enter_context(loader.batches()) for loader in loaders), strict=True):
            *rows, columns = (
                list(layer_features(module, batches[distinct.index(section)].inputs, own, centered_kernel).values())
                for module, section, own in zip(modules, sections, names, strict=True)
            )
            for total, kernels in zip(totals, rows, strict=True):
                total.update(kernels, columns)
            progress.add(len(batches[0]))
    *row_sparsities, sparsity = (inverse_density(network) for network in networks)
    return [
        Similarity(
            first.name,
            second.name,
            own,
            names[-1],
            total.values(),
            total.samples,
            min(samples.batch, total.samples),
            sparsity,
            row_sparsity,
        )
        for first, own, total, row_sparsity in zip(firsts, names, totals, row_sparsities, strict=False)
    ]


def inputs_section(network: Network, default: AnyDataSection, samples: Samples) -> AnyDataSection:
    """How a network reads the samples that both are compared on."""
    path = str(samples.data or default.path)
    if not path:
        raise InputError(f"{network.name} has no data of its own: give a prepared folder with --data")
    classes = read_manifest(Path(path)).classes
    own, wanted = isinstance(network.data, DataSection), isinstance(default, DataSection)
    if own != wanted:
        raise InputError(f"{network.name}: reads {network.data.kind}, the other network {default.kind}")
    split = samples.split or default.eval_split
    number = max(network.data.num_classes, len(classes))  # labels are not used
    return network.data.model_copy(update={"path": path, "eval_split": split, "num_classes": number})


def inverse_density(network: Network) -> float | None:
    """1/p: of a mask its key, and not the number of weights that were sampled; of others by the cost formulas."""
    if network.section is None:
        return None
    density = (
        getattr(network.section, "density", None)
        or model_cost(network.section, network.data.image_size, network.data.num_classes).density
    )
    return None if math.isnan(density) else 1 / density


def mean_diagonals(similarities: Sequence[Similarity]) -> list[dict[str, Any]]:
    """Return figure 2a: for each 1/p the mean diagonal over all pairs of networks, their deviation, and how many.

    `std` is None for a single pair. Pairs that share a network are not independent, so `matched` has the values of
    those alone that share none: the first of A with the first B of this 1/p, the second with the second, and so on.
    Empty where a matrix is not square, or 1/p is not known.
    """
    groups: dict[float, list[tuple[str, str, float]]] = {}
    for each in similarities:
        mean = diagonal_mean(each.values)
        if mean is None or each.sparsity is None:
            return []
        if not math.isnan(mean):
            groups.setdefault(each.sparsity, []).append((each.row_network, each.column_network, mean))
    found = []
    for sparsity, pairs in sorted(groups.items()):
        rows, columns, means = zip(*pairs, strict=True)
        matches = set(zip(dict.fromkeys(rows), dict.fromkeys(columns), strict=False))
        found.append(
            {
                "inverse_density": sparsity,
                "mean": statistics.fmean(means),
                "std": statistics.stdev(means) if len(means) > 1 else None,
                "pairs": len(means),
                "matched": [mean for row, column, mean in pairs if (row, column) in matches],
            }
        )
    return found


def mean_diagonals_csv(similarities: Sequence[Similarity]) -> str:
    """Return `mean_diagonals` as a CSV table, without `matched`; empty where they are."""
    rows = mean_diagonals(similarities)
    names = [name for name in rows[0] if name != "matched"] if rows else []
    return csv_text([names, *([row[name] for name in names] for row in rows)]) if rows else ""


def similarities_json(similarities: Sequence[Similarity]) -> dict[str, Any]:
    """Return what --json writes: one comparison as it is, several under `comparisons`, with `mean_diagonals`."""
    entries = [similarity.as_json() for similarity in similarities]
    if len(entries) == 1:
        return entries[0]
    return {"comparisons": entries, "mean_diagonals": mean_diagonals(similarities)}


def similarity_figures(similarities: Sequence[Similarity]) -> dict[str, Callable[[], Figure]]:
    """Return what plots cka.png, or cka_1.png, ... and the mean diagonals of several pairs, cka_diagonal.png.

    Of several first networks the mean diagonals alone.
    """
    if len(similarities) == 1:
        return {"cka.png": partial(plot_matrix, similarities[0])}
    figures: dict[str, Callable[[], Figure]] = {}
    if len({each.row_network for each in similarities}) == 1:
        figures |= {f"cka_{number}.png": partial(plot_matrix, each) for number, each in enumerate(similarities, 1)}
    if all(diagonal_mean(each.values) is not None for each in similarities):
        figures["cka_diagonal.png"] = partial(plot_diagonals, similarities)
    return figures


@styled
def plot_matrix(similarity: Similarity):
    """Return the heat map of figures 2b and 2c: the first network along the horizontal axis, input at the bottom."""
    side = 2.2 + 0.24 * max(len(similarity.rows), len(similarity.columns))
    figure, axes = new_figure(max(4.6, side + 1.2), max(3.8, side))
    heat_map(
        axes,
        similarity.values.T,
        (short_names(similarity.rows), short_names(similarity.columns)),
        "CKA",
    )
    mean = diagonal_mean(similarity.values)
    title = "" if mean is None else f"mean of the diagonal {mean:.3f}"
    names = (label(name).replace("_", " _") for name in (similarity.row_network, similarity.column_network))
    across, up = (fill(name, 30, break_on_hyphens=False).replace(" _", "_") for name in names)  # lines end before a _
    axes.set(xlabel=across, ylabel=up)
    axes.set_title(title)
    return figure


@styled
def plot_diagonals(similarities: Sequence[Similarity]):
    """Return figure 2a: the mean of the diagonal over 1/p, or over the networks where p is not known."""
    figure, axes = new_figure(6, 3.8)
    means = [diagonal_mean(similarity.values) or 0.0 for similarity in similarities]
    curve = mean_diagonals(similarities)
    if curve:
        axes.plot([similarity.sparsity for similarity in similarities], means, "o", alpha=0.35)
        x, y, spread = ([point[name] or 0 for point in curve] for name in ("inverse_density", "mean", "std"))
        axes.errorbar(x, y, spread, color=COLORS[0], marker="o", capsize=3)
        for sparsity in {one.row_sparsity for one in similarities if one.row_sparsity is not None}:
            axes.axvline(sparsity, color="black", linewidth=0.8, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("1/p, inverse of the fraction of weights that are not zero; dashed: of the first")
    else:
        names = [label(similarity.column_network) for similarity in similarities]
        axes.plot(names, means, "o")
        axes.tick_params(axis="x", rotation=30)
    firsts = list(dict.fromkeys(similarity.row_network for similarity in similarities))
    axes.set_ylabel("mean of the diagonal of CKA")
    axes.set_title(f"with {label(firsts[0])}" + (f" and {len(firsts) - 1} others" if len(firsts) > 1 else ""))
    return figure
