"""What a study's figure shows, against numbers that are computed here; golden/ has whole figures as text."""

import statistics
from dataclasses import replace

import numpy as np
import pytest

from tests.studies.conftest import WIDTHS, plan_of, row_of
from widemix.studies.figure import plot
from widemix.studies.points import Result
from widemix.studies.study_page import write_report

CURVE = [{"split": "eval", "epoch": epoch, "loss": 1.0, "top1": 50.0} for epoch in (1, 2)]


@pytest.fixture
def plotted(tmp_path, figures):
    """plotted(top1s, results=..., **figure) -> the axes of the widths' figure, of runs with these in their order."""

    def axes_of(top1s=(), results=None, study=WIDTHS, **figure):
        plan = plan_of(tmp_path, study)
        for study_run, top1 in zip(plan.study_runs, top1s, strict=False):
            plan.table.append(row_of(study_run, top1, curve=CURVE))
        parsed = plan.study.model_copy(update={"figure": plan.study.figure.model_copy(update=figure)})
        plan = replace(plan, study=parsed)
        plot(results(plan.study_runs) if results else plan.results(), parsed, [tmp_path / "a.svg"])
        return figures[-1].axes

    return axes_of


@pytest.mark.parametrize(("joined", "style"), [(True, "-"), (False, "None")])
def test_points_are_means_with_a_standard_deviation(plotted, joined, style):
    values = (60.0, 61.0, 65.0, 70.0, 72.0, 77.0, 71.0, 75.0, 79.0, 50.0)  # Normal: three of three seeds; RP: one
    [ax] = plotted(values, study=WIDTHS.replace("8, 16]", "8, 16, 32]", 1), joined=joined)
    normal, rp, published = ax.containers
    means, stds = [[f(values[at : at + 3]) for at in (0, 3, 6)] for f in (statistics.fmean, statistics.stdev)]
    points, _, (bars,) = normal.lines
    expected = np.array([[128, 256, 512], [100 - mean for mean in means]])
    np.testing.assert_allclose(points.get_xydata(), expected.T)
    ends = [segment[:, 1] for segment in bars.get_segments()]
    np.testing.assert_allclose(ends, [[y - std, y + std] for y, std in zip(expected[1], stds, strict=True)])
    lines = {line.get_label(): line for line in ax.lines}
    np.testing.assert_allclose(lines[" Normal"].get_xydata(), expected.T)
    np.testing.assert_allclose(lines[" RP"].get_xydata(), [[128, 50]])
    assert lines[" Normal"].get_linestyle() == style
    [crosses] = [line for line in ax.lines if line.get_marker() == "x"]  # where all is missing
    assert list(crosses.get_xdata()) == [256]
    assert (rp.has_yerr, published.get_label()) == (False, " Normal (figure 1, digitised)")


def test_lines_share_no_axis_of_one_place(plotted):
    """They are names on it then, and the place is said below."""
    [ax] = plotted((60.0, 61.0, 65.0, 70.0), study=WIDTHS.replace("[8, 16]", "[8]").partition("published")[0])
    assert [tick.get_text().strip() for tick in ax.get_xticklabels()] == ["Normal", "RP"]
    assert ax.get_xlabel() == "effective width m 128"


@pytest.mark.parametrize(("top1s", "reaches_0"), [((100.0, 99.5, 60.0), True), ((40.0, 42.0, 41.0), False)])
def test_no_axis_goes_below_0_for_bars(plotted, top1s, reaches_0):
    [ax] = plotted(top1s)
    assert (ax.dataLim.y0 < 0) == (ax.get_ylim()[0] == 0) == reaches_0
    assert ax.get_ylim()[0] >= 0


@pytest.mark.parametrize(("count", "columns"), [(3, 3), (4, 2), (5, 3), (7, 3)])
def test_many_panels_stand_in_rows(plotted, count, columns):
    panels = plotted(
        results=lambda runs: [Result(replace(runs[0], panel=str(n)), 8, {"error": 1.0}) for n in range(count)]
    )
    places = [(ax.get_subplotspec().rowspan.start, ax.get_subplotspec().colspan.start) for ax in panels]
    assert [ax.get_title().strip() for ax in panels] == list(map(str, range(count)))
    assert places == [divmod(n, columns) for n in range(count)]


@pytest.mark.parametrize(
    ("values", "at_values"),
    [([1, 99, 4], True), ([3, 4], True), (range(8), True), ([1, 100, 4], False), ([1, 2.5, 4], False), ([3], False),
     (range(9), False)],
)  # fmt: skip
def test_ticks_are_at_few_whole_numbers(plotted, values, at_values):
    """Two to eight, below 100."""

    def results(runs):
        return [Result(replace(runs[0], group=n, line=f"{n % 2}"), x, {"error": 1.0}) for n, x in enumerate(values)]

    [ax] = plotted(results=results)
    assert ([*ax.get_xticks()] == sorted(values)) == at_values


@pytest.mark.parametrize(
    ("x", "log_x", "log_y"), [("width", True, False), ("width", False, True), ("epoch", True, True)]
)
def test_axes_are_logarithmic_where_there_is_something(plotted, x, log_x, log_y):
    """Not those of a panel without results, as while the second data set is still being trained."""
    study = WIDTHS.replace("{Digits: ", "{Others: ", 1).partition("published")[0]
    full, empty = plotted((60.0,), study=study, x=x, log_x=log_x, log_y=log_y)
    scales = ("log" if log_x else "linear", "log" if log_y else "linear")
    assert (full.get_xscale(), full.get_yscale()) == scales
    assert empty.get_yscale() == "linear"


def test_values_and_names_share_an_axis(plotted):
    """Where one line has numbers and another has none, as a Mixer has no model.density."""
    [ax] = plotted(
        (60.0,), study=WIDTHS.replace("rp_s_mixer", "mixer").replace("  seeded", "  #"), x="model.expansion"
    )
    assert [text.get_text().strip() for text in ax.get_xticklabels()] == ["None", "2.0"]


@pytest.mark.parametrize(
    "name", ["a|b_c $x$", "_hidden", "$\\frac{$ `", "two\nlines", "<b>&amp;", "日本 🙂", 300 * "long", "שלום"]
)
def test_any_label_is_plotted_without_a_word(tmp_path, name):
    plan = plan_of(tmp_path, WIDTHS)
    figure = plan.study.figure.model_copy(update={"x_label": name, "names": {"k": name}})
    results = [Result(replace(run, line=name, panel=name), "k", {"error": 2.0}) for run in plan.study_runs]
    study = plan.study.model_copy(update={"figure": figure})
    files = write_report(results, study, plan.path, tmp_path)
    assert [path.name for path in files] == ["study.csv", "study.png", "study.svg", "study.md"]
    before = files[2].read_bytes()
    write_report(results, study, plan.path, tmp_path)
    assert files[2].read_bytes() == before  # the same figure, the same bytes
