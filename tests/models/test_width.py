"""(C, S) pairs of equal Omega, and what training keeps, against independent counts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InputError
from pipeline.models import model_cost
from pipeline.models.memory import state_bytes
from pipeline.models.width import pairs, tokens_of, widest
from pipeline.recipe.model import MixerSection


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
    with pytest.raises(InputError, match="less than one token"):
        pairs(1000, 1, [200])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_plain_training_keeps_what_the_formula_says(name):
    model = torch.nn.Linear(30, 20)
    options = {"momentum": 0.9, "nesterov": True} if name == "sgd" else {}
    optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name](model.parameters(), lr=0.1, **options)
    model(torch.randn(2, 30)).sum().backward()
    optimizer.step()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    cost = state_bytes(numbers, optimizer=name)
    assert cost.weights == sum(parameter.nbytes for parameter in model.parameters())
    assert cost.gradients == sum(parameter.grad.nbytes for parameter in model.parameters())
    states = [tensor for state in optimizer.state.values() for key, tensor in state.items() if key != "step"]
    assert cost.optimizer == sum(tensor.nbytes for tensor in states)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_stages_are_those_of_its_paper(stage, gigabytes):
    """Figure 1 of Rajbhandari et al. 2020: 7.5 B weights, Adam, half precision, 64 ranks."""
    cost = state_bytes(7_500_000_000, engine="deepspeed", zero_stage=stage, world=64, precision="bf16")
    assert cost.total / 1e9 == pytest.approx(gigabytes, abs=0.06)
