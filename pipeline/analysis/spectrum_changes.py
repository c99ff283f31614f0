"""What training does to the singular values of runs of one recipe with several seeds: `widemix analyse spectrum`."""

import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from widemix.analysis.spectrum import LayerSpectrum
from widemix.analysis.training_spectrum import Course
from widemix.errors import InputError
from widemix.plots.style import COLORS, new_figure, styled

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
