"""The figure of `widemix bench scale` has the numbers of its rows."""

import pytest

from widemix.plots.lines import plot_scaling


def test_throughput_is_next_to_the_ideal_one() -> None:
    rows = [
        {"ranks": 2, "images_per_s": 300.0, "efficiency": 1.0, "compute": 0.03, "data wait": 0.01, "other": 0.0},
        {"ranks": 4, "images_per_s": 450.0, "efficiency": 0.75, "compute": 0.02, "data wait": 0.03, "other": 0.01},
    ]
    parts = ("compute", "data wait", "other")
    figure = plot_scaling(rows, parts)
    speed, steps = figure.axes
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    assert legends == [["ideal", "measured"], [*parts]]
    curves = {line.get_label(): [*zip(*line.get_data(), strict=True)] for line in speed.lines}
    assert curves == {"ideal": [(2, 300), (4, 600)], "measured": [(2, 300), (4, 450)]}
    assert [(text.get_text(), text.xy) for text in speed.texts] == [("75%", (4, 450))]
    assert [text.get_text() for text in speed.get_yticklabels()] == ["300", "450"]
    for axes in figure.axes:
        assert [text.get_text() for text in axes.get_xticklabels()] == ["2", "4"]
    assert not [*speed.get_xticks(minor=True), *speed.get_yticks(minor=True)]
    bars = [[(bar.get_y(), bar.get_height()) for bar in container] for container in steps.containers]
    expected = [[(0, 30), (0, 20)], [(30, 10), (20, 30)], [(40, 0), (50, 10)]]
    assert [pytest.approx(each) for part in bars for each in part] == [each for part in expected for each in part]
