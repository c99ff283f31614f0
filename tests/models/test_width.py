"""(C, S) pairs of equal Omega against independent counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widemix.errors import InputError
from widemix.models.cost import model_cost
from widemix.models.layer_costs import pairs, tokens_of, widest
from widemix.models.mixer.section import MixerSection


@given(st.floats(1, 1e4), st.floats(1e3, 1e12), st.floats(0.1, 8))
def test_closed_form_solves_the_definition(channels, omega, gamma):
    tokens = tokens_of(channels, omega, gamma)
    assert gamma * (channels * tokens**2 + channels**2 * tokens) / 2 == pytest.approx(omega, rel=1e-6)


@given(st.floats(1e6, 1e12), st.floats(0.5, 8))
def test_nothing_is_wider_than_equal_channels_and_tokens(omega, gamma):
    best = widest(omega, gamma)
    assert tokens_of(best, omega, gamma) == pytest.approx(best, rel=1e-9)
    for factor in (0.25, 0.9, 1.1, 4):
        assert factor * best * tokens_of(factor * best, omega, gamma) < best**2


def test_pairs_have_the_omega_that_the_cost_says():
    for channels, tokens in pairs(2.0**21, 2, [32, 64, 128, 256]):
        shape = {"tokens": tokens, "channels": channels, "depth": 2, "project_tokens": True}
        cost = model_cost(MixerSection(kind="mixer", patch_size=1, expansion=2, **shape), 1, 10)
        first = 2 * channels * tokens * (tokens - 1) / 8  # the first layer maps one token, not S
        half_a_token = 2 * (2 * channels * tokens + channels**2) / 4
        assert abs(cost.omega + first - 2**21) <= half_a_token
    assert pairs(2.0**18, 1, [64]) == [(64, 64)]
    assert pairs(300, 2, [12, 5]) == [(12, 2), (5, 6)]  # 12 * 1.8, 5 * 5.6: rounded to whole tokens
    assert pairs(1000, 1, [62]) == [(62, 1)]  # 0.52 tokens
    with pytest.raises(InputError, match="C = 63: at Omega = 1000, gamma = 1 less than one token"):
        pairs(1000, 1, [62, 63])
