"""What the figures of the analyses show: the numbers and words of all that is drawn, as figures.yaml has them.

`python -m tests.analysis.test_figures` writes that file anew: look at the diff.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from widemix.analysis.effective_weights import plot_fields, plot_weights
from widemix.analysis.evaluation import NAMED, plot_confusion, plot_reliability
from widemix.analysis.filters import Filters, plot_filters
from widemix.analysis.pixels import PixelScores, plot_scores
from widemix.analysis.regularisation import plot_sweep, regression
from widemix.analysis.separation_rank import SeparationRank, plot_ranks
from widemix.analysis.similarity import Similarity, plot_diagonals, plot_matrix
from widemix.analysis.sparse_spectrum import plot_scaling, plot_widening
from widemix.analysis.spectrum import LayerSpectrum
from widemix.analysis.training_spectrum import changes, plot_changes, plot_course
from widemix.evaluation.assessment import BINS, Assessment, Details
from widemix.plots import lines
from widemix.plots.style import COLORS

GOLDEN = Path(__file__).with_name("figures.yaml")


def assessed(classes: list[str]) -> Assessment:
    return Assessment("runs/a", "data", "val", 9, 1, {"top1": 51.234}, classes)


def confusion(classes: list[str], counts: Any) -> Figure:
    return plot_confusion(assessed(classes), Details(counts, [], [], 0.0))


def reliability() -> Figure:
    bins: list[dict[str, Any]] = [{"samples": 0, "confidence": None, "accuracy": None} for _ in range(BINS)]
    bins[3] = {"samples": 5, "confidence": 0.25, "accuracy": 0.125}
    bins[14] = {"samples": 7, "confidence": 0.96, "accuracy": 0.5}
    return plot_reliability(assessed([]), Details([], [], bins, 0.4567))


def pair(first: str, value: float, sparsity: float | None) -> Similarity:
    return Similarity(first, "b", ["1"], ["1"], np.full((1, 1), value), 48, 16, sparsity, sparsity and 2.0)


PAIRS = [pair("a", 0.25, 2.0), pair("a", 0.75, 2.0), pair("a", 0.5, 8.0)]
MATRIX = Similarity(
    "a", "b", ["m.in", "m.out"], ["n.1", "n.2"], np.array([[0.25, 0.0], [1.0, 0.5]]), 48, 16, None, None
)
RANKS = [
    {"ranks": 2, "images_per_s": 300.0, "efficiency": 1.0, "compute": 0.03, "data wait": 0.01, "other": 0.0},
    {"ranks": 4, "images_per_s": 450.0, "efficiency": 0.75, "compute": 0.02, "data wait": 0.03, "other": 0.01},
]
WIDENED = [
    {"width": 10, "largest": [1.0, 3.0], "marchenko_pastur": 4.0, "l_plus": 5.0, "l_plus_as_printed": 6.0},
    {"width": 20, "largest": [2.0, 2.5], "marchenko_pastur": 7.0, "l_plus": 8.0, "l_plus_as_printed": 9.0},
]
SCALED = {0.0: np.array([[2.0, 1.0], [4.0, 1.0]]), 0.5: np.array([[5.0, 3.0, 1.0], [6.0, 2.0, 0.5]])}
WEIGHTS = {"x": np.array([[1.0, 0.0, -0.5], [0.0, 2.0, 0.0]]), "y": np.array([[0.0, 3.0]])}
FIELDS = {
    "fields": [{"mean": 0.1}, {"mean": 0.4}],
    "fields_with_skips": [{"mean": 0.2}, {"mean": 0.8}],
    "features": 16,
}
MINIMA = [
    {
        "decay": decay,
        **{side: decay * n for n, side in enumerate(("mixer", "frobenius", "l1"), 1)},
        **{f"{side}_spread": spread and spread / n for n, side in enumerate(("mixer", "frobenius", "l1"), 1)},
    }
    for decay, spread in ((0.25, 0.5), (4.0, None))  # of a matrix of zeros
]
TOPS = {"original": 90.0, "patches": 70.5, "all": 40.0}
SCORES = [PixelScores(name, name, 2, 9, {k: v + n for k, v in TOPS.items()}, {}) for n, name in enumerate("ab")]
SHEET = np.stack([np.full((2, 2), value) for value in (3.0, -3.0, 1.0)])


def layer(name: str, largest: float, spread: float | None = None, shape: tuple[int, int] = (2, 2)) -> LayerSpectrum:
    return LayerSpectrum(name, shape, 1, np.array([largest, 0.5]), 2.0, shape == (2, 2), spread)


# Two runs: two layers at the start, in the middle, which does not count, and at the end.
MIDDLE = (1, [layer("a", 100, 0.9), layer("b", 100, 0.9)])
RUNS = {
    "one": [(0, [layer("a", 2, 0.6), layer("b", 4, 0.5)]), MIDDLE, (2, [layer("a", 8, 0.2), layer("b", 6, 0.3)])],
    "two": [(0, [layer("a", 1, 0.8), layer("b", 1, 0.7)]), MIDDLE, (2, [layer("a", 2, 0.4), layer("b", 3, 0.1)])],
}
KINDS = ("blocks.3.mlp_tokens.fc1", "stages.1.blocks.0.mlp.fc1", "stem.proj", "stem.0", "blocks.2.mlp_tokens.fc1")

FIGURES: dict[str, Callable[[], Figure]] = {
    "confusions, fractions of the true class": lambda: confusion(["a", "b"], [[3, 1, 0], [0, 199, 1], [0, 0, 0]]),
    "reliability, accuracy at the mean confidence": reliability,
    "cka of two networks": lambda: plot_matrix(MATRIX),
    "cka of layers without a diagonal": lambda: plot_matrix(
        replace(MATRIX, columns=["n.1"], values=MATRIX.values[:, :1])
    ),
    "cka over sparsity": lambda: plot_diagonals(PAIRS),
    "cka with several first networks": lambda: plot_diagonals([*PAIRS, pair("c", 0.5, 8.0), pair("d", 0.5, 8.0)]),
    "cka of unknown sparsity": lambda: plot_diagonals([pair("a", 0.25, None), pair("a", 0.75, None)]),
    "figure 4, wide": lambda: plot_widening(WIDENED, 100, 2.0),
    "figure 4, narrow": lambda: plot_widening(WIDENED, 100, 0.5),
    "figure 4, square, where both readings are the same": lambda: plot_widening(WIDENED, 100, 1.0),
    "figure S.1": lambda: plot_scaling(100, SCALED),
    "spectra of a run": lambda: plot_course("one", [RUNS["one"][0], RUNS["one"][2]]),
    "spectra of one step, a line style for each kind of layer": lambda: plot_course(
        "two", [(0, [layer(name, number) for number, name in enumerate(KINDS, 1)])]
    ),
    "the largest values of a spectrum": lambda: plot_course("one", [(0, [layer("c", 3, None, (8, 20))])]),
    "what training changes": lambda: plot_changes(changes(RUNS)),
    "where weights are": lambda: plot_weights({"a": WEIGHTS, "b": {"x": WEIGHTS["x"]}}),
    "weights between their extremes": lambda: plot_weights({"a": WEIGHTS, "b": {"x": WEIGHTS["x"]}}, values=True),
    "receptive fields": lambda: plot_fields([{"network": name, **FIELDS, "features": 16} for name in "ab"]),
    "receptive fields of more networks than colours": lambda: plot_fields(
        [{"network": f"n{n}", **FIELDS, "features": 16} for n in range(len(COLORS) + 2)]
    ),
    "accuracy on shuffled pixels": lambda: plot_scores(SCORES, 8),
    "minima of proposition 3.3": lambda: plot_sweep(MINIMA, regression(3, 2, 30, noise=0.3, seed=0)),
    "separation ranks": lambda: plot_ranks(
        {"Mixer": [SeparationRank(1, 1, 1, 4), SeparationRank(2, 3, 3, 9)]}, {"bound": [6.3, 12.6]}, "title"
    ),
    "weak scaling, from the ideal and by parts": lambda: lines.plot_scaling(RANKS, ("compute", "data wait", "other")),
    "filters in order, with their sign": lambda: plot_filters(
        "x", Filters("layer", SHEET, np.array([1, 0, 2]), np.zeros(3), -np.ones(1))
    ),
}


def plot_lines() -> Figure:
    """Points with bars, of which two have one x; points without; a curve in its band; and references."""
    points, curve, theirs = (figure := Figure()).subplots(1, 3)
    for number, joined in ((1, True), (8, False)):
        lines.Line(points, number, "a_$b$", COLORS[1]).points([1, 1, 2, 3], [3, 6, 5, 5], [0.5, 1, 0, 0], joined)
    few = lines.Line(points, 2, "c", COLORS[2])
    few.points([1, 2], [3, 4], [0, 0], True)
    few.values([1, 2], [12345.6, 0.12345])
    few.missing([])
    few.missing([3, 5])
    lines.Line(curve, 0, "a", COLORS[0]).band([1, 2, 4], [3, 5, 4], [1, 0.5, 2])
    for reference in ([(1, 2), (3, 4, 0.5)], [(1, 2, 0.0)], [(1, 2), (2, 3), (3, 4)]):
        lines.plot_reference(theirs, reference, "theirs")
    for axes in figure.axes:
        axes.legend()
    return figure


FIGURES["lines with their spread, values and what is missing"] = plot_lines


def numbers(values: Any) -> Any:
    """Plain numbers of six digits, NaN as null; categories by name."""
    if np.asarray(values).dtype.kind == "U":
        return [str(value) for value in values]
    array = np.ma.filled(np.ma.asarray(values, dtype=float), np.nan)
    return [numbers(each) for each in array] if array.ndim else None if np.isnan(array) else float(f"{array:.6g}")


def style_of(line: Line2D) -> str:
    across = "" if line.get_transform() == line.axes.transData else " across"  # a place on the axis, and not a value
    return f"{line.get_linestyle()} {line.get_marker()}{across}"


def shown(axes: Axes) -> dict[str, Any]:
    """All that is drawn on a pair of axes, but for what matplotlib chooses by itself."""
    legend, title = axes.get_legend(), axes.get_title() or axes.get_title(loc="left")
    named = [axis for axis in (axes.xaxis, axes.yaxis) if isinstance(axis.get_major_locator(), FixedLocator)]
    bands = [each for each in axes.collections if isinstance(each, PolyCollection)]
    segments = [each.get_segments() for each in axes.collections if isinstance(each, LineCollection)]
    found = {
        "title": title.strip(),
        "labels": f"{axes.get_xlabel()} | {axes.get_ylabel()}".strip(" |"),
        "scales": f"{axes.get_xscale()} {axes.get_yscale()}".replace("linear linear", ""),
        "x limits": [] if axes.get_autoscalex_on() else numbers(axes.get_xlim()),
        "y limits": [] if axes.get_autoscaley_on() and not axes.images else numbers(axes.get_ylim()),
        "ticks": [[text.get_text() for text in axis.get_ticklabels()] for axis in named],
        "framed": bool(axes.images) and axes.spines["top"].get_visible(),
        "legend": [text.get_text() for text in legend.get_texts()] if legend else [],
        "lines": [[style_of(line), numbers(line.get_xdata()), numbers(line.get_ydata())] for line in axes.lines],
        "bands": [numbers(path.vertices) for each in bands for path in each.get_paths()],
        "error bars": [numbers(segment) for each in segments for segment in each],
        "bars": [numbers([bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()]) for bar in axes.patches],
        "images": [[numbers(each.get_clim()), numbers(each.get_array())] for each in axes.images],
        "texts": [[numbers(text.get_position()), text.get_text(), text.get_color()] for text in axes.texts],
    }
    return {name: value for name, value in found.items() if value}


def described(name: str) -> list[dict[str, Any]]:
    return [shown(axes) for axes in FIGURES[name]().axes if axes.get_visible()]


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_shows_these_numbers(name):
    assert described(name) == yaml.safe_load(GOLDEN.read_text())[name]


def test_long_names_lose_their_middle():
    names = ["$a_b$", 30 * "a", 12 * "a" + 2 * "b" + 17 * "c"]
    axes = confusion(names, np.eye(3, dtype=int).tolist()).axes[0]
    found = [text.get_text().replace("\\$", "$") for text in axes.get_xticklabels()]
    assert found == ["$a_b$", 30 * "a", 12 * "a" + "…" + 17 * "c"]
    axes.figure.draw_without_rendering()


@pytest.mark.parametrize(("count", "side"), [(12, 6.44), (13, 6.76), (NAMED, 9), (NAMED + 1, 9)])
def test_up_to_twelve_classes_have_numbers_and_forty_names(count, side):
    axes = confusion([f"c{number}" for number in range(count)], np.eye(count, dtype=int).tolist()).axes[0]
    assert len(axes.texts) == (12 if count == 12 else 0)
    assert axes.figure.get_size_inches() == pytest.approx([side + 1, side])
    assert ("c11" in [text.get_text() for text in axes.get_xticklabels()]) is (count <= 40)


@pytest.mark.parametrize("is_second", [False, True])
def test_names_of_a_heat_map_lie_within_the_figure(is_second):
    """Runs of a study are named after all that they differ in, which is longer than the axis."""
    name = "cifar10-figure2a_sw_mlp_density-0.0625_lr-0.016_seed-0_mask_seed-0"
    names = ("b", f"runs/{name}_ac954d07a1") if is_second else (f"runs/{name}_ac954d07a1", "b")
    figure = plot_matrix(replace(MATRIX, row_network=names[0], column_network=names[1]))
    axes = figure.axes[0]
    found = [label.replace("\n", "") for label in (axes.get_xlabel(), axes.get_ylabel())]
    assert found == (["b", name] if is_second else [name, "b"])
    figure.draw_without_rendering()
    for text in (axes.xaxis.label, axes.yaxis.label):
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width, text
        assert 0 <= box.y0 < box.y1 <= figure.bbox.height, text


def test_a_rank_of_one_has_its_point():
    [axes] = FIGURES["separation ranks"]().axes
    assert axes.viewLim.y0 <= 0
    assert axes.get_xticks().tolist() == [1, 2]  # whole layers
    assert np.isfinite(axes.transData.transform(np.array(axes.lines[0].get_data()).T)).all()


if __name__ == "__main__":
    content = {name: described(name) for name in FIGURES}
    GOLDEN.write_text(
        yaml.safe_dump(content, default_flow_style=None, width=116, sort_keys=False, allow_unicode=True)
    )
    sys.exit(0)
