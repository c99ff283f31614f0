"""Golden losses: the digits recipes on every engine and one or two ranks, against one plain PyTorch loop.

Measured over 20 steps (relative, the most of any step): float32 2.3e-7, bf16 5.1e-4 from the plain loop in float32.
"""

import functools
import math

import pytest
import torch

from tests.engine.plain import plain_loop
from tests.engine.ranks import GOLDEN, Setting, golden

TOLERANCE = {"fp32": 1e-6, "bf16": 1e-3}
pytestmark = pytest.mark.filterwarnings("ignore")  # DeepSpeed's own imports warn


@pytest.fixture(scope="module")
def one_rank(alone, digits):
    return golden(digits)


@pytest.fixture(scope="module")
def expected(alone, digits):
    @functools.cache
    def curve(recipe: str) -> list[float]:
        setting = Setting(recipe, digits)
        batches = [(batch.inputs, batch.targets) for (batch,) in setting.steps]
        return plain_loop(setting.model(), batches, setting.rates, optim=setting.recipe.optim)

    return curve


@pytest.mark.parametrize("case", GOLDEN, ids="-".join)
def test_one_rank_has_the_losses_of_the_plain_loop(one_rank, expected, case):
    recipe, _, precision = case
    assert one_rank[case] == pytest.approx(expected(recipe), rel=TOLERANCE[precision])


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_fp16_skips_a_step_on_all_ranks_that_is_too_large_on_one(ranks, engine):
    found = ranks[2]["overflowing"][engine]
    scales = [scalars["loss_scale"] for scalars, _ in found["states"]]
    assert scales == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
    assert [scalars["loss_scale_steps"] for scalars, _ in found["states"]] == [1, 2, 0, 1]
    before, bad, after = (weights for _, weights in found["states"][1:])
    assert all(torch.equal(bad[name], before[name]) for name in before)
    assert not torch.equal(after["head.weight"], bad["head.weight"])
    assert math.isfinite(found["losses"][3])


@pytest.mark.parametrize("case", GOLDEN, ids="-".join)
def test_two_ranks_have_the_losses_of_the_plain_loop(ranks, expected, case):
    recipe, _, precision = case
    assert ranks[2]["golden"][case] == pytest.approx(expected(recipe), rel=TOLERANCE[precision])
