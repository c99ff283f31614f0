"""The figures of `widemix eval`: confusions in percent of each true class, and accuracy over confidence."""

import numpy as np
import pytest

from widemix.analysis.evaluation import NAMED, plot_confusion, plot_reliability
from widemix.evaluation.assessment import BINS, Assessment, Details


def assessed(classes: list[str]) -> Assessment:
    return Assessment("runs/a", "data", "val", 9, 1, {"top1": 51.234}, classes)


def test_confusions_are_fractions_of_the_true_class_which_goes_down():
    details = Details([[3, 1, 0], [0, 199, 1], [0, 0, 0]], [], [], 0.0)
    axes, bar = plot_confusion(assessed(["a", "b"]), details).axes
    [image] = axes.images
    assert np.array_equal(image.get_array(), [[75, 25, 0], [0, 99.5, 0.5], [0, 0, 0]])
    assert image.get_clim() == (0, 100)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted class", "true class")
    assert axes.get_ylim() == (2.5, -0.5)
    for axis in (axes.xaxis, axes.yaxis):
        assert [text.get_text() for text in axis.get_ticklabels()] == ["a", "b", "2"]
    shown = [(text.get_position(), text.get_text(), text.get_color()) for text in axes.texts]
    assert shown == [
        ((0, 0), "75", "white"),
        ((1, 0), "25", "black"),
        ((1, 1), "100", "white"),
        ((2, 1), "0", "black"),
    ]
    assert axes.get_title() == "a: top-1 51.23 %"
    assert bar.get_ylabel() == "fraction of the true class, %"


def test_names_are_as_they_are_but_for_the_middle_of_long_ones():
    names = ["$a_b$", 30 * "a", 12 * "a" + 2 * "b" + 17 * "c"]
    details = Details(np.eye(3, dtype=int).tolist(), [], [], 0.0)
    axes = plot_confusion(assessed(names), details).axes[0]
    shown = [text.get_text().replace("\\$", "$") for text in axes.get_xticklabels()]
    assert shown == ["$a_b$", 30 * "a", 12 * "a" + "…" + 17 * "c"]
    axes.figure.draw_without_rendering()


@pytest.mark.parametrize(("count", "side"), [(12, 6.44), (13, 6.76), (NAMED, 9), (NAMED + 1, 9)])
def test_up_to_twelve_classes_have_numbers_and_up_to_forty_names(count, side):
    details = Details(np.eye(count, dtype=int).tolist(), [], [], 0.0)
    axes = plot_confusion(assessed([f"c{number}" for number in range(count)]), details).axes[0]
    assert len(axes.texts) == (12 if count == 12 else 0)
    assert axes.figure.get_size_inches() == pytest.approx([side + 1, side])
    assert ("c11" in [text.get_text() for text in axes.get_xticklabels()]) is (count <= 40)


def test_the_diagram_has_the_accuracy_of_each_bin_at_its_mean_confidence_and_the_samples_of_all():
    bins = [{"samples": 0, "confidence": None, "accuracy": None} for _ in range(BINS)]
    bins[3] = {"samples": 5, "confidence": 0.25, "accuracy": 0.125}
    bins[14] = {"samples": 7, "confidence": 0.96, "accuracy": 0.5}
    above, below = plot_reliability(assessed([]), Details([], [], bins, 0.4567)).axes
    bars = [(bar.get_x(), bar.get_x() + bar.get_width(), bar.get_height()) for bar in above.patches]
    assert bars == [pytest.approx(each) for each in ((3 / 15, 4 / 15, 0.125), (14 / 15, 1, 0.5))]
    assert [[*line.get_xydata().ravel()] for line in above.lines] == [[0.25, 0.125, 0.96, 0.5], [0, 0, 1, 1]]
    assert [bar.get_height() for bar in below.patches] == [bins[n]["samples"] for n in range(BINS)]
    assert [bar.get_x() for bar in below.patches] == pytest.approx([n / 15 for n in range(BINS)])
    assert above.get_title() == "a: expected calibration error 0.457"
    assert (above.get_ylim(), below.get_xlim()) == ((0, 1), (0, 1))
    assert (above.get_ylabel(), below.get_ylabel()) == ("accuracy", "samples")
