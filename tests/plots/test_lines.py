"""Lines with their spread, the hull of points, and what stands at logarithmic axes."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy.spatial import ConvexHull

from widemix.plots.lines import Line, add_legend_below, legend_text, line_colors, plot_pareto_hull
from widemix.plots.style import COLORS, as_png, log_axis


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_the_hull_is_scipys_down_to_the_lowest_point(seed, log):
    points = np.random.default_rng(seed).uniform(0.1, 10, (40, 2))
    axes = Figure().subplots()
    axes.plot(*points.T, "o")
    if log:
        log_axis(axes, "x")
    plot_pareto_hull(axes, points.tolist())
    scaled = np.stack([np.log(points[:, 0]) if log else points[:, 0], points[:, 1]], axis=1)
    corners = ConvexHull(scaled).vertices.tolist()  # counterclockwise
    first, lowest = int(np.argmin(scaled[:, 0])), int(np.argmin(scaled[:, 1]))
    corners = corners[corners.index(first) :] + corners[: corners.index(first)]
    expected = points[corners[: corners.index(lowest) + 1]]
    np.testing.assert_array_equal(axes.lines[-1].get_xydata(), expected)


def test_the_hull_of_points_in_a_line_has_the_ends():
    axes = Figure().subplots()
    for points, expected in (
        ([(1, 3), (2, 2), (3, 1)], [(1, 3), (3, 1)]),
        ([(1, 3), (1, 2)], [(1, 2)]),
        ([(1, 2), (2, 3)], [(1, 2)]),
    ):
        plot_pareto_hull(axes, points)
        assert [tuple(point) for point in axes.lines[-1].get_xydata()] == expected


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.6, 4, ["0.6", "0.8", "1", "2", "3", "4"]),
        (3, 400, ["5", "10", "20", "50", "100", "200"]),
        (700, 20_000, ["1,000", "2,000", "5,000", "10,000", "20,000"]),
        (1, 1e5, [r"$\mathdefault{10^{0}}$", r"$\mathdefault{10^{1}}$", r"$\mathdefault{10^{2}}$"]),
    ],
)
def test_ticks_of_few_decades_read_as_numbers(low, high, labels):
    figure = Figure()
    axes = figure.subplots()
    axes.plot([low, high], [0, 1])
    log_axis(axes, "x")
    as_png(figure)
    view = axes.get_xlim()
    shown = [tick.get_text() for tick in axes.get_xticklabels() if view[0] <= tick.get_position()[0] <= view[1]]
    assert shown[: len(labels)] == labels
    assert not any(tick.get_text() for tick in axes.get_xticklabels(minor=True))


@pytest.mark.parametrize(
    ("names", "places"),
    [
        (["Normal", "RP", "RP, permuted skips", "SW-MLP"], [0, 1, 1, 2]),
        (["SW-MLP", "Mixer, channels 8", "Mixer-SS/8", "Single RP", "ResNet"], [2, 0, 0, 1, 3]),
        (["Dense", "Mixers", "RPM", "a", "b", "c", "d", "e"], [0, 1, 2, 3, 4, 5, 6, 0]),
        (["a", "Normal", "b", "c", "d", "e", "f", "g"], [1, 0, 2, 3, 4, 5, 6, 1]),
    ],
)
def test_a_network_has_the_same_colour_in_all_figures(names, places):
    """What is no such network has one of the other colours."""
    assert line_colors(names) == [COLORS[place] for place in places]


@pytest.mark.parametrize(
    ("names", "columns"), [(["a"], 0), (["a", "b"], 2), (["a", "b", "c", "d", "e"], 4), (["a", "b" * 60], 1)]
)
def test_a_legend_has_each_name_once(names, columns):
    figure = Figure(figsize=(6, 3))
    panels = figure.subplots(1, 2)
    for axes in panels:
        for number, name in enumerate(names):
            Line(axes, number, name, COLORS[0]).band([0, 1], [0, 1], [0, 0])
    add_legend_below(figure, panels)
    if not columns:
        assert figure.legends == []
        return
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [f" {name}" for name in names]
    assert legend._ncols == columns


def test_long_names_in_a_legend_are_cut_in_their_middle():
    assert legend_text("a" * 50 + "b" * 50) == " " + "a" * 50 + "b" * 50
    assert legend_text("a" * 50 + "c" + "b" * 50) == " " + "a" * 50 + "…" + "b" * 50
    assert legend_text("a\n b", 3) == " a b"
    assert legend_text("  ") == ""
