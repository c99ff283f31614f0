"""Bounds on separation ranks."""

import csv
import io
import math

import pytest

from widemix.studies.bounds import (
    as_csv,
    bounds,
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
    [row] = bounds([2], 27, 3, 5)
    base = math.log(2 * 5 * 27**2 * 3**2, 3)
    assert (row.mixer_upper, row.transformer_upper) == (pytest.approx(4 * base), pytest.approx(9 * base))
    assert row.transformer_lower == pytest.approx(math.log(27 - 5, 3) - math.log(2, 3))


def test_transformers_are_above_mixers_where_width_allows_enough_layers():
    rows = bounds(range(1, 30), 3**30, 196, 12)
    separated = [row.depth for row in rows if row.separated]
    assert separated == list(range(separated[0], separated[-1] + 1))
    assert 5 < separated[0] < 15


@pytest.mark.parametrize(
    ("sizes", "applies"),
    [
        *[((p, 3**30, 196, 12), p in (13, 29)) for p in (12, 13, 29, 30)],  # 13 <= p < log3 m
        *[((13, 3**15, 9**15 - less, 1), bool(less)) for less in (0, 1)],  # n < m^2
        *[((13, 3**15, 9, 3**15 // 2 + more), not more) for more in (0, 1)],  # H < m / 2
        *[((13, 4**12, 9, 4**12 // 2 - less), bool(less)) for less in (0, 1)],
    ],
)
def test_the_conclusion_ends_where_its_conditions_do(sizes, applies):
    assert strictly_smaller(*sizes) is applies


def test_theorems_end_where_their_conditions_do():
    assert [math.isnan(transformer_lower(1, 9, heads)) for heads in (8, 9, 10)] == [False, True, True]


def test_table_and_figure_show_the_bounds_of_each_depth(tmp_path, figures):
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
    plot(rows, "t", [tmp_path / "a.svg"])
    shown = {line.get_label()[-4:-1]: [*zip(*line.get_data(), strict=True)] for line in figures[0].axes[0].lines}
    assert shown == {
        "5.6": [(row.depth, row.transformer_upper) for row in rows],
        "5.7": [(row.depth, row.transformer_lower) for row in rows if row.transformer_lower > 0],
        "5.5": [(row.depth, row.mixer_upper) for row in rows],
    }
    few = bounds([1, 3], 28, 1, 27)
    assert few[1].transformer_lower < 0  # which a logarithmic axis has not
    plot(few, "t", [tmp_path / "a.svg"])
    [lower] = [line for line in figures[1].axes[0].lines if "5.7" in line.get_label()]
    assert list(lower.get_xdata()) == [1]


@pytest.mark.parametrize(("width", "power"), [(3**30, "$3^{30}$"), (3**5, "$3^{5}$"), (81, "81"), (1024, "1,024")])
def test_the_command_says_where_the_bounds_separate(tmp_path, widemix, figures, width, power):
    words = ("--width", width, "--depth", "35", "--tokens", "196", "--heads", "12")
    code, printed = widemix("study", "bounds", "--to", tmp_path, *words)
    assert code == 0, printed
    rows = bounds(range(1, 36), width, 196, 12)
    separated = [row.depth for row in rows if row.separated]
    where = f"{separated[0]} to {separated[-1]} layers" if separated else "none of these depths"
    assert printed.startswith(as_csv(rows))
    assert f"the upper one of Mixers at {where}\n" in printed
    assert f"conclusion 5.9 applies at {'13 to 29 layers' if width == 3**30 else 'none of these depths'}\n" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"bounds.csv", "bounds.png", "bounds.svg"}
    assert (tmp_path / "bounds.csv").read_text() == as_csv(rows)
    assert figures[0].axes[0].get_title() == f"m = {power}, n = 196, H = 12"
