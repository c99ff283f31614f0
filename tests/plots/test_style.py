"""Figures with the names that users give to classes and runs."""

import io
import warnings

import numpy as np
import pytest
from PIL import Image

from widemix.analysis.evaluation import plot_confusion
from widemix.evaluation.assessment import Assessment, Details
from widemix.plots.style import as_png, label, literal, new_figure, styled

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
