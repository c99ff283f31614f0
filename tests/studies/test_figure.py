# ruff: noqa: F401, F811 - `study` is a fixture
"""What a study's figure and page show, against numbers that are computed here."""

import json
import statistics
from dataclasses import replace

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.studies.test_report import STUDY, pretend, results_of, study
from widemix.errors import InputError
from widemix.plots.style import new_figure
from widemix.studies.figure import _whole_ticks, plot
from widemix.studies.page import as_page, write_report
from widemix.studies.plan import make_plan
from widemix.studies.results import Point, Result
from widemix.studies.rows import Table, add_core_seconds
from widemix.studies.study import read_study, study_runs_of


@pytest.fixture
def plotted(monkeypatch):
    """plotted(results, study): the axes of its figure, a list of rows."""

    def axes_of(results, parsed):
        figures = []
        monkeypatch.setattr("widemix.studies.figure.save", lambda figure, paths: figures.append(figure))
        plot(results, parsed, [])
        panels = len({result.study_run.panel for result in results})
        return [figures[0].axes[at : at + panels] for at in range(0, len(figures[0].axes), panels)]

    return axes_of


def bars(ax) -> dict[str, list[tuple[float, float, float]]]:
    """By colour and label: x, y and half the length of each error bar, which must lie evenly about its point."""
    found = {}
    for container in ax.containers:
        points, _, (lines,) = container.lines if container.has_yerr else (*container.lines[:2], (None,))
        x, y = map(np.asarray, points.get_data())
        ends = [segment[:, 1] for segment in lines.get_segments()] if lines else [(at, at) for at in y]
        assert [sum(pair) / 2 for pair in ends] == pytest.approx(list(y))
        halves = [(high - low) / 2 for low, high in ends]
        found[points.get_color(), container.get_label()] = list(
            zip(map(float, x), map(float, y), halves, strict=True)
        )
    return found


def test_the_figure_shows_means_standard_deviations_missing_points_and_what_was_published(study, tmp_path, plotted):
    values = (60.0, 61.0, 65.0, 70.0, 72.0, 77.0, 50.0)  # Normal: two points of three seeds; RP: one of one
    for study_run, top1 in zip(study_runs_of(study, read_study(study)), values, strict=False):
        pretend(study_run, tmp_path, top1)
    results, parsed = results_of(study, tmp_path, y=("error", "loss"))
    (errors,), (losses,) = plotted(results, parsed)
    assert [ax.get_subplotspec().colspan.start for ax in (errors, losses)] == [0, 1]
    assert errors.get_title() == losses.get_title() == " Digits"
    means, stds = [[f(values[at : at + 3]) for at in (0, 3)] for f in (statistics.fmean, statistics.stdev)]
    normal, rp, published = bars(errors).values()
    assert normal == [
        (16 * c, pytest.approx(100 - m), pytest.approx(s)) for c, m, s in zip((8, 16), means, stds, strict=True)
    ]
    assert rp == [(128, 50, 0)]
    assert published == [(128, 30, 1.5)]
    assert " Normal (figure 1, digitised)" in {label for _, label in bars(errors)}
    lines = {line.get_label(): [*zip(*line.get_data(), strict=True)] for line in errors.lines}
    assert lines[" Normal"] == [(x, y) for x, y, _ in normal]
    assert lines[" RP"] == [(128, 50)]
    [crosses] = [line for line in errors.lines if line.get_marker() == "x"]
    assert list(crosses.get_xdata()) == [256]
    assert [own[0][1] for own in bars(losses).values()] == [1, 1]
    assert errors.get_ylabel() == "test error (%)"
    assert losses.get_xlabel() == "effective width m"


@pytest.mark.parametrize(("tops", "reaches_0"), [((100.0, 99.5, 60.0), True), ((40.0, 42.0, 41.0), False)])
def test_no_axis_goes_below_0_for_bars_of_errors_that_cannot(study, tmp_path, plotted, tops, reaches_0):
    for study_run, top1 in zip(study_runs_of(study, read_study(study)), tops, strict=False):
        pretend(study_run, tmp_path, top1)
    ((ax,),) = plotted(*results_of(study, tmp_path))
    assert bars(ax)[next(iter(bars(ax)))][0][1] == pytest.approx(100 - statistics.fmean(tops))
    assert (ax.dataLim.y0 < 0) == reaches_0
    assert (ax.get_ylim()[0] == 0) == reaches_0
    assert ax.get_ylim()[0] >= 0


def test_errors_of_held_out_images_are_called_so(study, tmp_path, plotted):
    study.write_text(study.read_text() + "set: {data.eval_split: holdout}\n")
    results, parsed = results_of(study, tmp_path)
    assert plotted(results, parsed)[0][0].get_ylabel() == "held-out error (%)"
    assert "held-out error (%), mean" in as_page(results, parsed, study.name)
    text = study.read_text().replace("set: {data.eval_split: holdout}\n", "")
    study.write_text(text.replace("- label: RP\n", "- label: RP\n  set: {data.eval_split: holdout}\n"))
    assert plotted(*results_of(study, tmp_path))[0][0].get_ylabel() == "test error (%)"  # some are of test images


def test_a_learning_curve_shows_the_mean_and_a_band_of_one_standard_deviation(study, tmp_path, plotted):
    tops = (60.0, 64.0, 65.0)
    for study_run, top1 in zip(study_runs_of(study, read_study(study)), tops, strict=False):
        pretend(study_run, tmp_path, top1)
    ((ax,),) = plotted(*results_of(study, tmp_path, x="epoch"))
    line, (band,) = ax.lines[0], ax.collections[:1]
    mean, std = 100 - statistics.fmean(tops), statistics.stdev(tops)
    expected = [(epoch, mean + 3 - epoch) for epoch in (1, 2, 3)]
    assert np.allclose([*zip(*line.get_data(), strict=True)], expected)
    edges = {(round(x), round(float(y), 6)) for x, y in band.get_paths()[0].vertices}
    assert edges == {(x, round(y + sign * std, 6)) for x, y in expected for sign in (-1, 1)}


def test_a_page_names_all_commits_and_machines_data_and_epochs_of_its_runs(study, tmp_path):
    for study_run in study_runs_of(study, read_study(study))[:3]:
        pretend(study_run, tmp_path, 60.0)
    results, parsed = results_of(study, tmp_path)
    for number, result in enumerate(results[:3]):
        machine = ("one", "other")[number % 2]
        row = replace(result.row, commit=f"c{2 - number}", machine=machine, images_per_s=7.0 * number)
        results[number] = replace(result, row=row)
    page = as_page(results, parsed, study.name)
    assert "hours of training (wall clock) on one, other" in page
    assert "; commit c0, c1, c2. Every run" in page
    assert ", 0 to 14 images/s" in page
    run = results[3].study_run
    elsewhere = replace(run, shared=(("train.epochs", "7"), ("data.path", "far/other")))
    page = as_page([*results[:3], replace(results[3], study_run=elsewhere)], parsed, study.name)
    assert f"of 7, {run.recipe.train.epochs} epochs on `digits`, `other`; " in page


def test_a_page_adds_up_each_run_once_though_two_lines_share_it(study, tmp_path):
    again = STUDY[STUDY.index("- label: Normal") : STUDY.index("- label: RP")].replace("Normal", "Again")
    study.write_text(study.read_text().replace("- label: RP", f"{again.replace('ROOT', str(ROOT))}- label: RP"))
    study_runs = study_runs_of(study, read_study(study))
    (tmp_path / "logs").mkdir()
    for number, study_run in enumerate(study_runs[:4]):
        pretend(study_run, tmp_path, 60.0, seconds=1800.0, trained=[(1.0, 1500.0 + 500 * number)])
        add_core_seconds(tmp_path, study_run, 3600.0 * (1 + number))
    pretend(study_runs[-1], tmp_path, 60.0, seconds=1800.0)  # whose core seconds were not counted
    page = as_page(*results_of(study, tmp_path), "widths.yaml")
    epochs = study_runs[0].recipe.train.epochs
    assert f"5 of 12 runs have ended, 0 of them diverged, of {epochs} epochs on `digits`; 2.50 hours" in page
    assert "2.50 hours of training (wall clock) on 1 CPU core, 10.00 core hours of 4 runs" in page
    assert f"of 4 runs, 1,500 to 3,000 images/s; commit {12 * 'c'}. Every run" in page


def test_the_seconds_of_an_epoch_are_those_of_the_run_over_the_epochs_that_it_had(study, tmp_path):
    """Three of them: it ended after train.max_steps."""
    first = study_runs_of(study, read_study(study))[0]
    pretend(first, tmp_path, 60.0, seconds=90.0)
    results, _ = results_of(study, tmp_path, y=("epoch_seconds",))
    assert first.recipe.train.epochs > 3
    assert results[0].y["epoch_seconds"] == 30


def test_a_small_deviation_has_a_digit(study, tmp_path):
    losses = (0.0021, 0.0025, 0.0029)
    for study_run, loss in zip(study_runs_of(study, read_study(study)), losses, strict=False):
        pretend(study_run, tmp_path, 60.0)
        done = tmp_path / study_run.name / "done.json"
        done.write_text(json.dumps(json.loads(done.read_text()) | {"loss": loss}))
    page = as_page(*results_of(study, tmp_path, y=("loss",)), study.name)
    assert "| 0.0025 ± 0.0004 (3) |" in page


def test_values_that_are_no_numbers_are_named_and_lines_of_one_value_lie_side_by_side(study, tmp_path, plotted):
    for study_run in study_runs_of(study, read_study(study)):
        pretend(study_run, tmp_path, 60.0)
    names = {"s_mixer": "S-Mixer"}
    results, parsed = results_of(study, tmp_path, x="model.kind", names=names, x_label="network", y=("top1",))
    [[axes]] = plotted(results, parsed)
    assert [text.get_text() for text in axes.get_xticklabels()] == [" S-Mixer"]
    assert axes.get_xlabel() == "network"
    places = [{float(x) for x, _, _ in points} for points in bars(axes).values()]
    assert places[:2] == [{-0.125}, {0.125}]  # 60 both: none hides the other
    assert not axes.texts
    assert "| S-Mixer | " in as_page(results, parsed, "widths.yaml")
    assert "| network | " in as_page(results, parsed, "widths.yaml")


def test_points_that_x_does_not_order_are_not_joined(study, tmp_path, plotted):
    for study_run in study_runs_of(study, read_study(study)):
        pretend(study_run, tmp_path, 60.0)
    for joined, style in ((True, "-"), (False, "None")):
        results, parsed = results_of(study, tmp_path, joined=joined)
        [[axes]] = plotted(results, parsed)
        assert {line.get_linestyle() for line in axes.lines if line.get_label() in (" Normal", " RP")} == {style}


@pytest.mark.parametrize(
    ("figure", "words"),
    [
        (
            "{x: width, y: [data.path]}",
            "figure.y: data.path is .* at digits-s_mixer_channels-8_seed-0_.*, which is no num",
        ),
        ("{x: width, y: [error, augment.hflip], log_y: true}", "set figure.log_y to false"),
        ("{x: optim.l1, log_x: true}", "figure.x: optim.l1 is 0.0 at .*; set figure.log_x to false"),
        ("{x: width, y: [permuted_block]}", "figure.y: permuted_block is none at"),
        ("{x: width, y: [epoch]}", "y: epoch is an x axis, of learning curves"),
    ],
)
def test_what_cannot_be_plotted_is_refused_before_it_is_trained(study, tmp_path, figure, words):
    study.write_text(study.read_text().replace("{x: width}", figure))
    with pytest.raises(InputError, match=words):
        make_plan(study, read_study(study), Table(tmp_path / "widths.jsonl"))


def test_a_size_that_a_network_lacks_is_refused_before_it_is_trained(study, tmp_path):
    text = study.read_text().replace("{x: width}", "{x: c_over_s}")
    study.write_text(text.replace("digits/s_mixer", "cifar10/sw_mlp").replace("model.channels", "model.depth"))
    with pytest.raises(
        InputError, match=r"figure.x: cifar10-sw_mlp_depth-8_.*: model.channels: a model of kind sw_mlp"
    ):
        make_plan(study, read_study(study), Table(tmp_path / "widths.jsonl"))


@pytest.mark.parametrize("x", ["epoch", "width"])
def test_a_panel_without_results_has_no_logarithmic_axis(study, tmp_path, x):
    """As while the second data set is still being trained: a report is written meanwhile."""
    study.write_text(study.read_text().replace("{Digits: ", "{Others: ", 1).partition("published")[0])
    pretend(study_runs_of(study, read_study(study))[0], tmp_path, 60.0)
    results, parsed = results_of(study, tmp_path, x=x, log_x=True, log_y=True)
    (_, png, *_) = write_report(results, parsed, study, tmp_path / "report")
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "name", ["a|b_c $x$", "_hidden", "$\\frac{$ `", "two\nlines", "<b>&amp;", "日本 🙂", 300 * "long", "שלום"]
)
def test_any_label_is_plotted_without_a_word(study, tmp_path, name):
    parsed = read_study(study)
    figure = parsed.figure.model_copy(update={"x_label": name, "names": {"k": name}})
    study_runs = [replace(run, line=name, panel=name) for run in study_runs_of(study, parsed)]
    results = [Result(run, "k", {"error": 2.0}) for run in study_runs]
    write_report(results, parsed.model_copy(update={"figure": figure}), study, tmp_path)


@pytest.mark.parametrize(("count", "columns"), [(3, 3), (4, 2), (5, 3), (7, 3)])
def test_many_panels_stand_in_rows(study, plotted, count, columns):
    parsed = read_study(study)
    (run,) = study_runs_of(study, parsed)[:1]
    results = [Result(replace(run, panel=str(n)), 8, {"error": float(n)}) for n in range(count)]
    (panels,) = plotted(results, parsed)
    assert [ax.get_title().strip() for ax in panels] == list(map(str, range(count)))
    places = [ax.get_subplotspec() for ax in panels]
    assert [(place.rowspan.start, place.colspan.start) for place in places] == [
        divmod(n, columns) for n in range(count)
    ]


@pytest.mark.parametrize(("log_x", "log_y"), [(True, False), (False, True)])
def test_an_axis_is_logarithmic_where_the_study_says_so_and_ticks_are_at_few_whole_numbers(
    study, tmp_path, plotted, log_x, log_y
):
    for study_run in study_runs_of(study, read_study(study)):
        pretend(study_run, tmp_path, 60.0)
    results, parsed = results_of(study, tmp_path, x="model.channels", log_x=log_x, log_y=log_y)
    [[axes]] = plotted(results, parsed)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log" if log_x else "linear", "log" if log_y else "linear")
    assert ([*axes.get_xticks()] == [8, 16]) is not log_x
    assert "Pareto hull" not in {line.get_label() for line in axes.lines}
    [[axes]] = plotted(*results_of(study, tmp_path, pareto_hull=True))
    [hull] = [line for line in axes.lines if line.get_label() == "Pareto hull"]
    assert [*map(tuple, hull.get_xydata())] == [(128, 40)]
    assert [*axes.get_xticks()] != [128, 256]


@pytest.mark.parametrize(
    ("values", "at_values"),
    [
        ([1, 99, 4], True),
        ([1, 100, 4], False),
        ([1, 2.5, 4], False),
        ([3], False),
        ([3, 4], True),
        (range(8), True),
        (range(9), False),
    ],
)
def test_ticks_are_at_two_to_eight_whole_numbers_below_100(values, at_values):
    _, ax = new_figure(4, 3)
    ax.plot([-0.5, 100.5], [0, 1])
    before = [*ax.get_xticks()]
    points = [Point(float(value), 0.0, 0.0, 1, 1) for value in values]
    _whole_ticks(ax, {"a": points[::2], "b": points[1::2], "names": [Point("relu", 0.0, 0.0, 1, 1)]})
    assert [*ax.get_xticks()] == (sorted(values) if at_values else before)


def test_published_points_are_in_their_panel_and_titles_above_the_first_of_several_quantities(
    study, tmp_path, plotted
):
    study.write_text(study.read_text().replace("Digits: ", "One: ", 1).replace("Digits: ", "Two: ", 1))
    study.write_text(study.read_text().replace("digitised: true", "panel: Two"))
    results, parsed = results_of(study, tmp_path, y=("error", "loss"))
    above, below = plotted(results, parsed)
    shown = [[label for _, label in bars(axes) if "figure 1" in label] for axes in (*above, *below)]
    assert shown == [[], [" Normal (figure 1)"], [], []]
    assert [axes.get_title() for axes in (*above, *below)] == [" One", " Two", "", ""]
    everywhere = parsed.model_copy(update={"published": [parsed.published[0].model_copy(update={"panel": ""})]})
    shown = [[label for _, label in bars(axes) if "figure 1" in label] for axes in plotted(results, everywhere)[0]]
    assert shown == [[" Normal (figure 1)"]] * 2
    places = [axes.get_subplotspec() for axes in (*above, *below)]
    assert [(place.rowspan.start, place.colspan.start) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [axes.get_ylabel() for axes in (*above, *below)] == ["test error (%)"] * 2 + ["test loss"] * 2
    study.write_text(study.read_text().replace("{Two: ", "{One: ").replace("panel: Two", "panel: One"))
    results, parsed = results_of(study, tmp_path, y=("error", "loss", "top1", "train_loss"))
    places = [axes.get_subplotspec() for (axes,) in plotted(results, parsed)]
    assert [(place.rowspan.start, place.colspan.start) for place in places] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_sizes_of_named_networks_have_their_values_above_them(study, tmp_path, plotted):
    results, parsed = results_of(study, tmp_path, x="model.kind", y=("width",))
    [[axes]] = plotted(results, parsed)
    assert {text.get_text() for text in axes.texts} == {"128", "256"}
    results, parsed = results_of(study, tmp_path, y=("width",))
    assert not plotted(results, parsed)[0][0].texts
