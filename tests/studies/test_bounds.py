"""Bounds on separation ranks."""

import math

import pytest

from widemix.studies.bounds import bounds, dominates_deeper, mixer_upper, strictly_smaller, transformer_lower


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
