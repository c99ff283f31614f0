"""In which precision gradients are summed, over ranks and micro-batches: numbers that bf16 would lose."""

import pytest

from tests.engine.ranks import REDUCED

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize("engine", REDUCED)
def test_gradients_in_bf16_are_summed_in_fp32(ranks, engine, accumulated):
    assert ranks(2, "summed")[engine, accumulated, "fp32"] == 1 + (2 * accumulated - 1) * 2**-8


@pytest.mark.parametrize("engine", REDUCED)
def test_or_in_bf16_where_the_recipe_says_so(ranks, engine):
    assert ranks(2, "summed")[engine, 1, "bf16"] == 1.0
