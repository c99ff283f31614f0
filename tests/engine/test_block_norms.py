"""The gradient norms of blocks add up to that of the whole network."""

import pytest

from tests.engine.ranks import Setting


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_sum_of_blocks_is_the_whole_norm_of_a_step(alone, digits, precision):
    """In fp16 after the loss scale is divided out, as the norm of the whole is."""
    setting = Setting("mixer", digits, ("train.precision", precision))
    engine = setting.engine()
    engine.wants_block_norms = True
    result = engine.step(setting.steps[0], 1e-3)
    assert len(result.block_norms) == len(engine.blocks())
    assert result.block_norms.square().sum().sqrt().item() == pytest.approx(result.grad_norm.item(), rel=1e-5)
