"""Bounds on separation ranks."""

import csv
import io
import math

import pytest

from widemix.cli.parser import make_parser
from widemix.cli.study_pages import _power
from widemix.command_line.commands import run_command
from widemix.errors import InputError
from widemix.studies.bounds import (
    as_csv,
    bounds,
    dominates_deeper,
    mixer_upper,
    plot,
    strictly_smaller,
    transformer_lower,
)


def test_bounds_are_those_of_the_theorems():
    """In whole numbers where they are small: a rank of (2 H m^2 n^2)^(2^p)."""
    assert 3 ** mixer_upper(1, 2, 3, 1) == pytest.approx((2 * 1 * 4 * 9) ** 2)
    (row,) = bounds([2], 27, 3, 1)
    assert 3**row.mixer_upper == pytest.approx((2 * 27**2 * 9) ** 4)
    assert 3 ** (row.transformer_upper / 9) == pytest.approx(2 * 27**2 * 9)
    assert row.transformer_lower == pytest.approx(math.log(26, 3) - math.log(2, 3))
    assert math.isnan(transformer_lower(3, 27))  # p < log3 m
    assert not row.separated


def test_transformers_are_above_mixers_where_width_allows_enough_layers():
    rows = bounds(range(1, 30), 3**30, 196, 12)
    separated = [row.depth for row in rows if row.separated]
    assert separated == list(range(separated[0], separated[-1] + 1))
    assert 5 < separated[0] < 15
    assert [strictly_smaller(p, 3**30, 196, 12) for p in (12, 13, 29, 30)] == [False, True, True, False]
    assert (dominates_deeper(1.58), dominates_deeper(1.59)) == (True, False)


def test_the_theorems_end_where_their_conditions_do():
    width = 3**15
    assert [strictly_smaller(13, width, tokens) for tokens in (width**2 - 1, width**2)] == [True, False]
    assert [strictly_smaller(13, width, 9, heads) for heads in (width // 2, width // 2 + 1)] == [True, False]
    assert not strictly_smaller(13, 4**12, 9, 4**12 // 2)  # H < m / 2
    assert strictly_smaller(13, 4**12, 9, 4**12 // 2 - 1)
    assert [math.isnan(transformer_lower(1, 9, heads)) for heads in (8, 9, 10)] == [False, True, True]
    assert (dominates_deeper(math.log2(3)), dominates_deeper(1)) == (False, True)


@pytest.mark.parametrize("name", ["width", "tokens", "heads"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_that_no_network_has_are_refused(name, value):
    sizes = {"width": 9, "tokens": 1, "heads": 1}
    [row] = bounds([1], **sizes)
    assert 3**row.mixer_upper == pytest.approx((2 * 9**2) ** 2)
    with pytest.raises(InputError, match=f"^--{name} {value}: must be at least 1"):
        bounds([1], **sizes | {name: value})


def test_all_bounds_are_those_of_as_many_heads():
    [row] = bounds([2], 27, 3, 5)
    base = math.log(2 * 5 * 27**2 * 3**2, 3)
    assert (row.mixer_upper, row.transformer_upper) == (pytest.approx(4 * base), pytest.approx(9 * base))
    assert row.transformer_lower == pytest.approx(math.log(27 - 5, 3) - math.log(2, 3))


def test_the_table_and_the_figure_show_the_bounds_of_each_depth(monkeypatch):
    rows = bounds(range(1, 36), 3**30, 196, 12)
    assert {row.separated for row in rows} == {False, True}
    assert any(math.isnan(row.transformer_lower) for row in rows)
    text = as_csv(rows)
    assert "\r" not in text
    for row, line in zip(rows, csv.DictReader(io.StringIO(text)), strict=True):
        assert (line["depth"], line["separated"]) == (str(row.depth), str(row.separated).lower())
        for name in ("mixer_upper", "transformer_lower", "transformer_upper"):
            value, shown = getattr(row, name), line[f"{name}_log3"]
            assert shown == "" if math.isnan(value) else float(shown) == pytest.approx(value, rel=1e-5)
    figures = []
    monkeypatch.setattr("widemix.studies.bounds.save", lambda figure, paths: figures.append(figure))
    plot(rows, "t", [])
    shown = {line.get_label()[-4:-1]: [*zip(*line.get_data(), strict=True)] for line in figures[0].axes[0].lines}
    assert shown == {
        "5.6": [(row.depth, row.transformer_upper) for row in rows],
        "5.7": [(row.depth, row.transformer_lower) for row in rows if row.transformer_lower > 0],
        "5.5": [(row.depth, row.mixer_upper) for row in rows],
    }
    few = bounds([1, 3], 28, 1, 27)
    assert few[1].transformer_lower < 0  # which a logarithmic axis has not
    plot(few, "t", [])
    [lower] = [line for line in figures[1].axes[0].lines if "5.7" in line.get_label()]
    assert list(lower.get_xdata()) == [1]


def test_the_command_says_where_the_bounds_separate(tmp_path, capsys):
    words = ["study", "bounds", "--to", str(tmp_path), "--width", str(3**30), "--depth", "35"]
    assert run_command(make_parser(), argv=[*words, "--tokens", "196", "--heads", "12"]) == 0
    printed = capsys.readouterr().out
    rows = bounds(range(1, 36), 3**30, 196, 12)
    separated = [row.depth for row in rows if row.separated]
    assert printed.startswith(as_csv(rows))
    assert f"the upper one of Mixers at {separated[0]} to {separated[-1]} layers\n" in printed
    assert "conclusion 5.9 applies at 13 to 29 layers\n" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"bounds.csv", "bounds.png", "bounds.svg"}
    assert (tmp_path / "bounds.csv").read_text() == as_csv(rows)
    assert run_command(make_parser(), argv=["study", "bounds", "--to", str(tmp_path), "--width", "8"]) == 0
    assert "conclusion 5.9 applies at none of these depths\n" in capsys.readouterr().out


def test_widths_of_the_theorems_are_shown_as_powers():
    assert [_power(width) for width in (3**30, 3**5, 81, 1024)] == ["$3^{30}$", "$3^{5}$", "81", "1,024"]
