"""Singular values of layers along training, and how several seeds change them: `widemix analyse spectrum`."""

import statistics
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from torch import nn

from widemix.analysis.spectrum import LayerSpectrum, products, spectra
from widemix.errors import InputError
from widemix.evaluation.networks import Network, initial_module, load_network, of_recipe
from widemix.models.registry import empty_inputs
from widemix.plots.style import COLORS, label, new_figure, styled
from widemix.run.checkpoint import complete_checkpoints

LINES = ("-", "--", ":", "-.")
Course = list[tuple[int | None, list[LayerSpectrum]]]  # a step, None if it is not known, and the layers at it


def course(name: str, patterns: Sequence[str] = (), ema: bool = False, of_products: bool = False) -> Course:
    """Return the spectra of a network's layers, of a run folder at the start and at each checkpoint.

    Layers match one of the patterns, such as `blocks.*.fc1`; without any they are all. of_products: of V (x) W of
    each block of an S-Mixer instead.
    """
    checkpoints = complete_checkpoints(Path(name))
    if not checkpoints:
        network = load_network(name, ema)
        first = initial_module(network.recipe) if network.recipe else network.module
        return [(_step(name, network), _chosen(network, first, patterns, of_products))]
    last = load_network(str(checkpoints[-1]), ema)
    assert last.recipe is not None
    start = of_recipe(name, last.recipe, initial_module(last.recipe))
    between = ((int(path.name), load_network(str(path), ema)) for path in checkpoints[:-1])
    networks = [(0, start), *between, (int(checkpoints[-1].name), last)]
    return [(step, _chosen(network, start.module, patterns, of_products)) for step, network in networks]


def _step(name: str, network: Network) -> int | None:
    if Path(name).name.isdecimal():
        return int(Path(name).name)
    return 0 if network.recipe else None


def _chosen(network: Network, start: nn.Module, patterns: Sequence[str], of_products: bool) -> list[LayerSpectrum]:
    if of_products:
        if not (found := products(network.module)):
            raise InputError("--products: those of an S-Mixer, whose mixings have one layer each without groups")
        return found
    size = network.data.image_size
    inputs = empty_inputs(network.section, 1, size) if network.section else torch.zeros(1, 3, size, size)
    found = spectra(network.module, inputs, start)
    chosen = [each for each in found if not patterns or any(fnmatchcase(each.layer, p) for p in patterns)]
    if not chosen:
        names = ", ".join(each.layer for each in found[:6])
        raise InputError(f"--layers {' '.join(patterns)}: matches none of the linear layers {names}, ...")
    return chosen


def as_json(name: str, steps: Course) -> dict[str, Any]:
    """Return what --json writes: of the first and the last step all singular values, between them the largest."""
    entries = []
    for number, (step, layers) in enumerate(steps):
        whole = number in (0, len(steps) - 1)
        entries.append({"step": step, "layers": [_layer_json(layer, whole) for layer in layers]})
    return {"network": name, "steps": entries}


def _layer_json(layer: LayerSpectrum, whole: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"layer": layer.layer, "largest": layer.largest, "edge_at_start": layer.edge}
    if layer.spread is not None:
        entry["spread"] = layer.spread
    if whole:
        rows, columns = layer.shape
        entry |= {
            "shape": layer.shape,
            "repeats": layer.repeats,
            "effective_shape": (layer.repeats * rows, layer.repeats * columns),
            "complete": layer.complete,
            "singular_values": layer.values.tolist(),
        }
    return entry


@styled
def plot_course(name: str, steps: Course):
    """Return the figure: the largest singular values by step, and all of them at the start and at the end.

    Divided by where the largest is at the start (Marchenko-Pastur, of masked weights L+).
    """
    figure, (left, right) = new_figure(9, 3.8, columns=2)
    layers = [layer.layer for layer in steps[-1][1]]
    kinds = list(dict.fromkeys(_kind(layer) for layer in layers))
    ramp = mpl.colormaps["viridis"](np.linspace(0, 0.9, len(layers)))
    for number, (layer, color) in enumerate(zip(layers, ramp, strict=True)):
        style = {"color": color, "linestyle": LINES[kinds.index(_kind(layer)) % len(LINES)]}
        ratios = [found[number].largest / found[number].edge for _, found in steps]
        if len(steps) > 1:
            left.plot([step for step, _ in steps], ratios, **style)
        else:
            left.plot([number], ratios, "o", color=color)
        last = steps[-1][1][number]
        places = (np.arange(len(last.values)) + 0.5) / min(last.shape)
        right.plot(places, last.values / last.edge, **style)
    for first in steps[0][1] if len(steps) > 1 else ():
        places = (np.arange(len(first.values)) + 0.5) / min(first.shape)
        right.plot(places, first.values / first.edge, color="0.75", linewidth=1, zorder=0)
    for axes in (left, right):
        axes.axhline(1, color="black", linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set_ylim(bottom=0)
    left.set(ylabel="largest singular value / edge at the start", xlabel="step" if len(steps) > 1 else "layer")
    left.set_title(label(name))
    right.set(xlabel="rank / number of singular values", ylabel="singular value / edge at the start")
    right.set_title("all singular values" + (", grey: at the start" if len(steps) > 1 else ""))
    for kind, line in zip(kinds, LINES * len(kinds), strict=False):
        right.plot([], [], line, color="black", label=kind)
    right.legend(fontsize=8, loc="upper right")
    scale = mpl.cm.ScalarMappable(mpl.colors.Normalize(0, max(len(layers) - 1, 1)), mpl.colors.ListedColormap(ramp))
    figure.colorbar(scale, ax=[left, right], label="layer, from the input", ticks=[0, len(layers) - 1])
    return figure


def _kind(layer: str) -> str:
    """A layer's name without its block: blocks.3.mlp_tokens.fc1 -> mlp_tokens.fc1."""
    parts = layer.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[numbers[-1] + 1 :]) if numbers and numbers[-1] + 1 < len(parts) else "others"


_LABELS = {
    "largest": "largest singular value / edge at the start",
    "spread": r"spread $\|B\|_1\,/\,(\sqrt{n}\,\|B\|_F)$",
}


def changes(courses: Mapping[str, Course]) -> dict[str, Any]:
    """Return what --json writes of several run folders.

    Of each layer, and as `mean` of the mean over them: `start`, `end` and their difference `change` of the largest
    singular value over where it is at the start, and of the spread of a product; each a list over the runs.
    """
    firsts, lasts = [], []
    for name, steps in courses.items():
        if len(steps) < 2:
            raise InputError(f"{name}: has one state alone; give run folders, which have a start and an end")
        firsts.append([_numbers(layer) for layer in steps[0][1]])
        lasts.append([_numbers(layer) for layer in steps[-1][1]])
    layers = [[layer.layer for layer in steps[-1][1]] for steps in courses.values()]
    for name, own in zip(courses, layers, strict=True):
        if own != layers[0]:
            raise InputError(f"{name}: has other layers than {next(iter(courses))}; compare runs of one recipe")
    pairs = [
        _over_runs([run[n] for run in firsts], [run[n] for run in lasts]) | {"layer": layer}
        for n, layer in enumerate(layers[0])
    ]
    mean = _over_runs([_mean(run) for run in firsts], [_mean(run) for run in lasts])
    return {"networks": list(courses), "layers": pairs, "mean": mean}


def _numbers(layer: LayerSpectrum) -> dict[str, float]:
    found = {"largest": layer.largest / layer.edge}
    return found if layer.spread is None else found | {"spread": layer.spread}


def _mean(layers: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(layer[name] for layer in layers) for name in layers[0]}


def _over_runs(first: list[dict[str, float]], last: list[dict[str, float]]) -> dict[str, dict[str, list[float]]]:
    names = first[0]
    start, end = ({name: [run[name] for run in runs] for name in names} for runs in (first, last))
    change = {name: [b - a for a, b in zip(start[name], end[name], strict=True)] for name in names}
    return {"start": start, "end": end, "change": change}


def as_lines(found: dict[str, Any]) -> list[str]:
    """A line for each layer and one for their mean: means over the runs, at the start and at the end."""
    lines = []
    for layer in [*found["layers"], found["mean"] | {"layer": "mean of these layers"}]:
        start, end = layer["start"], layer["end"]
        parts = [f"{name} {statistics.fmean(start[name]):.4f} to {statistics.fmean(end[name]):.4f}" for name in start]
        lines.append(f"{layer['layer']:<32} {', '.join(parts)}")
    return lines


@styled
def plot_changes(found: dict[str, Any]):
    """Return the figure: each quantity by layer, at the start in grey and at the end, a point for each run."""
    names = list(found["mean"]["start"])
    figure, panels = new_figure(4.2 * len(names), 3.4, columns=len(names), squeeze=False)
    places = range(1, len(found["layers"]) + 1)
    for name, ax in zip(names, panels.flat, strict=True):
        for state, colour, text in (("start", "0.6", "at the start"), ("end", COLORS[0], "after training")):
            values = np.array([layer[state][name] for layer in found["layers"]])  # [layers, runs]
            ax.plot(places, values.mean(1), color=colour, label=text)
            ax.plot(places, values, "o", color=colour, markersize=3)
        ax.set(xlabel="layer, from the input", ylabel=_LABELS[name], xticks=places)
        ax.set_ylim(0, 1 if name == "spread" else None)
    panels.flat[0].legend()
    return figure
