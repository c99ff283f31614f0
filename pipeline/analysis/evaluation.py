"""Figures of `widemix eval`: confusions and calibration."""

import numpy as np

from widemix.evaluation.assessment import BINS, Assessment, Details
from widemix.plots.style import COLORS, label, literal, new_figure, styled

NAMED = 40  # classes whose names fit


@styled
def plot_confusion(assessment: Assessment, details: Details):
    """Return the confusion matrix as fractions of each true class, in percent."""
    counts = np.array(details.confusion, float)
    fractions = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    number = len(counts)
    side = min(9, 2.6 + 0.32 * number)
    figure, axes = new_figure(side + 1, side)
    image = axes.imshow(fractions, vmin=0, vmax=100, cmap="Blues")
    if number <= NAMED:
        names = [
            *(literal(_cut(name)) for name in assessment.classes),
            *map(str, range(len(assessment.classes), number)),
        ]
        axes.set_xticks(range(number), names, rotation=90)
        axes.set_yticks(range(number), names)
    if number <= 12:
        for row, column in np.ndindex(fractions.shape):
            value = fractions[row, column]
            if value >= 0.5:
                color = "white" if value > 50 else "black"
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=color, fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.set_title(f"{label(assessment.network)}: top-1 {assessment.metrics['top1']:.2f} %")
    figure.colorbar(image, ax=axes, label="fraction of the true class, %", shrink=0.8)
    return figure


@styled
def plot_reliability(assessment: Assessment, details: Details):
    """Return the reliability diagram: accuracy over confidence, and how many samples have it."""
    figure, (above, below) = new_figure(4.6, 4.8, rows=2, sharex=True, height_ratios=[3, 1])
    edges = np.arange(BINS) / BINS
    filled = [place for place, entry in enumerate(details.bins) if entry["samples"]]
    accuracy = [details.bins[place]["accuracy"] for place in filled]
    confidence = [details.bins[place]["confidence"] for place in filled]
    above.bar(edges[filled], accuracy, 1 / BINS, align="edge", color=COLORS[5], edgecolor="white")
    above.plot(confidence, accuracy, "o", color=COLORS[0], clip_on=False)  # at the bin's mean confidence
    above.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="--")
    above.set(ylabel="accuracy", ylim=(0, 1))
    above.set_title(f"{label(assessment.network)}: expected calibration error {details.ece:.3f}")
    samples = [entry["samples"] for entry in details.bins]
    below.bar(edges, samples, 1 / BINS, align="edge", color="0.7", edgecolor="white")
    below.set(xlabel="confidence", ylabel="samples", xlim=(0, 1))
    return figure


def _cut(name: str) -> str:
    """A class's name, without its middle where it is so long that it would leave no room for the matrix."""
    return name if len(name) <= 30 else f"{name[:12]}…{name[-17:]}"
