"""The gradient norms of blocks add up to that of the whole network."""

import pytest

from tests.engine.ranks import Setting
from widemix.engine import Engine
from widemix.engine.interface import block_of
from widemix.errors import InputError


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_sum_of_blocks_is_the_whole_norm(alone, digits, precision):
    """In fp16 after the loss scale is divided out, as the norm of the whole is."""
    setting = Setting("mixer", digits, ("train.precision", precision))
    engine = setting.engine()
    engine.wants_block_norms = True
    result = engine.step(setting.steps[0], 1e-3)
    assert len(result.block_norms) == len(engine.blocks())
    assert result.block_norms.square().sum().sqrt().item() == pytest.approx(result.grad_norm.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("blocks.3.norm.weight", "blocks.3"),
        ("blocks.12.mlp.0.bias", "blocks.12"),
        ("stages.1.blocks.0.scale", "stages.1"),
        ("blocks.3", "blocks"),
        ("head.fc.1.bias", "head"),
        ("cls_token", "cls_token"),
    ],
)
def test_a_block_is_the_first_number_of_a_name(name, block):
    assert block_of(name) == block


@pytest.mark.parametrize(
    ("unused", "named"), [("abc", "3 of its parameters (a, b, c)"), ("abcd", "4 of its parameters (a, b, c, ...)")]
)
def test_the_first_parameters_without_a_gradient_are_named(unused, named):
    Engine.check_used(None, [])
    with pytest.raises(InputError) as raised:
        Engine.check_used(None, list(unused))
    assert named in str(raised.value)
