"""Figures with the names that users give to classes and runs."""

import io
import os
import subprocess
import sys
import warnings

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from tests.conftest import ROOT
from widemix.analysis.evaluation import plot_confusion
from widemix.evaluation.assessment import Assessment, Details
from widemix.plots.style import as_png, heat_map, label, literal, log_axis, new_figure, save, short_names, styled

ASSESSMENT = Assessment("runs/a", "data", "val", 2, 1, {"top1": 50.0}, ["one", "other"])
DETAILS = Details([[1, 0], [1, 0]], [100.0, 0.0], [], 0.0)


@pytest.mark.parametrize("name", ["$5 or $10", r"$\frac$", r"a\$b$", "x_1^2", "日本", "tab\tand\nline"])
def test_names_are_drawn_letter_by_letter(name):
    """Between two dollar signs matplotlib reads mathematics, and raises where it is none."""
    assessment = Assessment(f"runs/{name}", "data", "val", 2, 1, {"top1": 50.0}, [name, "other"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = plot_confusion(assessment, DETAILS)
        assert as_png(figure).startswith(b"\x89PNG")
    [tick, _] = figure.axes[0].get_xticklabels()
    drawn, is_mathematics = tick._preprocess_math(tick.get_text())
    assert (drawn, is_mathematics) == (name, False)
    assert label(f"runs/{name}/checkpoints/00000100").endswith(" step 100")


def test_no_settings_of_the_current_folder_reach_a_figure(tmp_path):
    program = (
        "import hashlib; from widemix.plots.style import as_png, new_figure, styled;"
        "print(hashlib.sha256(as_png(styled(new_figure)(3, 2)[0])).hexdigest())"
    )

    def plotted() -> str:
        words = {"env": os.environ | {"PYTHONPATH": str(ROOT)}, "cwd": tmp_path, "stdout": subprocess.PIPE}
        return subprocess.run([sys.executable, "-Pc", program], check=True, **words).stdout

    before = plotted()
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfigure.facecolor: red\nbackend: module://theirs\n")
    assert plotted() == before


def test_long_names_leave_room_for_the_matrix():
    """The taxonomic names of iNaturalist, for instance; matplotlib gives up its layout where there is no room."""
    classes = [f"04221_Animalia_Chordata_Aves_Passeriformes_Passeridae_Passer_{name}" for name in ("a", "b")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = plot_confusion(Assessment("runs/" + 60 * "long", "d", "val", 2, 1, {"top1": 50.0}, classes), DETAILS)
        as_png(figure)
    drawn = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert drawn == ["04221_Animal…sseridae_Passer_a", "04221_Animal…sseridae_Passer_b"]


def test_a_label_leaves_out_the_hash_of_a_studys_run():
    assert label("runs/a/cifar10-s_mixer_seed-0_eb0b37165e") == "cifar10-s_mixer_seed-0"
    assert label("runs/a/s_mixer_eb0b37165e/checkpoints/00000100") == "s_mixer step 100"
    assert label("runs/digits_0123456789a") == "digits_0123456789a"  # eleven digits: a name of its own


@styled
def test_axes_have_no_frame():
    """But a line on the left and one below."""
    figure, axes = new_figure(2, 2)
    axes.set_xticks([])
    axes.set_yticks([])
    dark = np.asarray(Image.open(io.BytesIO(as_png(figure))).convert("L")) < 128
    rows, columns = np.flatnonzero(dark.mean(axis=1) > 0.5), np.flatnonzero(dark.mean(axis=0) > 0.5)
    height, width = dark.shape
    assert rows.size
    assert columns.size
    assert rows.min() > height / 2
    assert columns.max() < width / 2


@styled
def test_names_of_any_bytes_are_drawn():
    """A class folder's may be no UTF-8, of which matplotlib made a traceback; dollars are no mathematics."""
    figure, axes = new_figure(2, 2)
    axes.set_xticks([0], [literal("\udcff$a$")])
    figure.canvas.draw()
    assert axes.get_xticklabels()[0].get_text() == r"?\$a\$"


def test_the_same_figure_is_the_same_file(tmp_path):
    def paths(name):
        figure, axes = new_figure(2, 1.5)
        axes.plot([1, 2], [3, 4])
        own = [tmp_path / f"{name}.{suffix}" for suffix in ("svg", "png")]
        save(figure, own)
        return [path.read_bytes() for path in own]

    (svg, png), again = paths("a"), paths("b")
    assert [svg, png] == again
    assert b"<svg" in svg
    assert b"<dc:date>" not in svg
    assert Image.open(io.BytesIO(png)).size == (300, 225)


def test_a_heat_map_has_its_first_row_at_the_bottom():
    figure, axes = new_figure(3, 3)
    heat_map(axes, np.array([[0.0, 0.25], [1.0, np.nan]]), (["a", "bb"], ["c", "long"]), "similarity")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert [text.get_text() for text in axes.get_xticklabels()] == ["a", "bb"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["c", "long"]
    assert {text.get_rotation() for text in axes.get_xticklabels()} == {0}
    pixels = np.asarray(canvas.buffer_rgba())[..., :3] / 255
    for place, value in (((0, 0), 0.0), ((1, 0), 0.25), ((0, 1), 1.0), ((1, 1), None)):
        x, y = axes.transData.transform(place)
        expected = (0.8, 0.8, 0.8) if value is None else mpl.colormaps["viridis"](value)[:3]
        np.testing.assert_allclose(pixels[len(pixels) - int(y), int(x)], expected, atol=0.005)
    assert axes.get_ylim() == (-0.5, 1.5)
    [colours] = [each for each in figure.axes if each is not axes]
    assert (colours.get_ylabel(), colours.get_ylim()) == ("similarity", (0, 1))
    heat_map(axes, np.zeros((1, 1)), (["abc"], ["d"]), "")
    assert {text.get_rotation() for text in axes.get_xticklabels()} == {90}


def test_names_are_shortened_by_whole_parts():
    assert short_names(["blocks.0.mlp", "blocks.1.mlp", "blocks.10"]) == ["0.mlp", "1.mlp", "10"]
    assert short_names(["head.a1", "head.a2", "head.b"]) == ["a1", "a2", "b"]
    assert short_names(["blocks.11.x", "blocks.12.x"]) == ["11.x", "12.x"]
    assert short_names(["stem", "head"]) == ["stem", "head"]
    assert short_names(["a.b", "a.b.c"]) == ["a.b", "a.b.c"]
    names = ["runs/a", "recipes/b.yaml", "c.yml", "runs/a/checkpoints/00000100", "runs/checkpoints/best", "runs/v1.5"]
    assert [label(name) for name in names] == ["a", "b", "c", "a step 100", "best", "v1.5"]


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (1.0, 999.0, ["1", "2", "5", "10", "20", "50", "100", "200", "500"]),
        (1.0, 1000.0, None),
        (1.0, 10.0, ["1", "2", "3", "4", "6", "8", "10"]),
        (1.0, 10.1, ["1", "2", "5", "10"]),
        (1e-3, 1e-2, ["0.001", "0.002", "0.003", "0.004", "0.006", "0.008", "0.01"]),
        (9e-4, 1e-2, None),
        (2e5, 999_999.0, ["200,000", "300,000", "400,000", "600,000", "800,000"]),
        (2e5, 1e6, None),
        (2.2, 2.9, None),  # none between
        (2.2, 3.5, None),  # one
        (2.2, 4.5, ["3", "4"]),
    ],
)
@pytest.mark.parametrize("name", ["x", "y"])
def test_a_logarithmic_axis_has_numbers_within_three_decades(name, low, high, shown):
    figure, axes = new_figure(2, 2)
    axes.set(xlim=(low, high), ylim=(low, high))
    log_axis(axes, name)
    axis, other = (axes.xaxis, axes.yaxis) if name == "x" else (axes.yaxis, axes.xaxis)
    assert (axis.get_scale(), other.get_scale()) == ("log", "linear")
    figure.canvas.draw()
    texts = [text.get_text() for text in axis.get_ticklabels()]
    if shown is None:
        assert not any(text and "$" not in text for text in texts)
    else:
        assert texts == shown
