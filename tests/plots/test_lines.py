"""Lines with their spread, the hull of points, and what stands at logarithmic axes."""

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from scipy.spatial import ConvexHull

from widemix.plots.lines import Line, add_legend_below, legend_text, line_colors, plot_pareto_hull, plot_reference
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


def bars_of(axes):
    """The bars of the newest points with a spread: (x, from, to) of each."""
    _, _, [bars] = axes.containers[-1].lines
    return [(segment[0, 0], *segment[:, 1]) for segment in bars.get_segments()]


def test_points_have_bars_and_are_joined_by_means():
    axes = Figure().subplots()
    for number, joined in ((1, True), (8, False)):
        line = Line(axes, number, "a_$b$", COLORS[1])
        line.points([1, 1, 2, 3], [3, 6, 5, 5], [0.5, 1, 0, 0], joined)
        assert bars_of(axes) == [(1, 2.5, 3.5), (1, 5, 7), (2, 5, 5), (3, 5, 5)]
        points, means = axes.containers[-1].lines[0], axes.lines[-1]
        assert [*zip(*points.get_data(), strict=True)] == [(1, 3), (1, 6), (2, 5), (3, 5)]
        assert [*zip(*means.get_data(), strict=True)] == [(1, 4.5), (2, 5), (3, 5)]
        assert (points.get_linestyle(), means.get_linestyle()) == ("None", "-" if joined else "None")
        assert to_hex(means.get_color()) == to_hex(points.get_color()) == COLORS[1].lower()
        assert means.get_marker() == "osD^vP*X<>"[number]
    line.points([1, 2], [3, 4], [0, 0], True)
    assert not axes.containers[-1].has_yerr
    assert axes.lines[-1].get_linestyle() == "None"  # nothing is known between two points
    assert axes.get_legend_handles_labels()[1] == [r" a_\$b\$"] * 3


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


def test_a_curve_lies_within_its_spread():
    axes = Figure().subplots()
    Line(axes, 0, "a", COLORS[0]).band([1, 2, 4], [3, 5, 4], [1, 0.5, 2])
    assert [*zip(*axes.lines[-1].get_data(), strict=True)] == [(1, 3), (2, 5), (4, 4)]
    corners = {tuple(corner) for corner in axes.collections[-1].get_paths()[0].vertices}
    assert corners == {(1, 2), (1, 4), (2, 4.5), (2, 5.5), (4, 2), (4, 6)}
    plot_reference(axes, [(1, 2), (3, 4, 0.5)], "theirs")
    assert bars_of(axes) == [(1, 2, 2), (3, 3.5, 4.5)]
    plot_reference(axes, [(1, 2, 0.0)], "theirs")
    assert not axes.containers[-1].has_yerr
    assert axes.get_legend_handles_labels()[1] == [" a", " theirs", " theirs"]


def test_values_are_above_their_points():
    axes = Figure().subplots()
    line = Line(axes, 2, "a", COLORS[2])
    line.values([1, 2], [12345.6, 0.12345])
    assert [(text.get_text(), text.xy) for text in axes.texts] == [
        ("1.235e+04", (1, 12345.6)),
        ("0.1235", (2, 0.12345)),
    ]
    assert [text.xyann for text in axes.texts] == [(0, 23)] * 2  # in points: two rows of nine above the first
    line.missing([])
    assert not axes.lines
    line.missing([3, 5])
    [marks] = axes.lines
    transform = axes.get_xaxis_transform().transform([(3, 0.08), (5, 0.08)])
    np.testing.assert_allclose(marks.get_transform().transform(marks.get_xydata()), transform)


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
