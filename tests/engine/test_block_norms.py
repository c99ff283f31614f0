"""The gradient norms of blocks, and the names of what gets no gradient."""

from collections import defaultdict

import pytest
from torch.nn.functional import cross_entropy

from tests.engine.ranks import Setting
from widemix.engine import Engine
from widemix.engine.interface import block_of
from widemix.errors import InputError


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_norms_of_blocks_are_those_of_their_gradients(alone, digits, precision):
    """In fp16 after the loss scale is divided out, as the norm of the whole is."""
    setting = Setting("mixer", digits, ("train.precision", precision))
    engine, model, squares = setting.engine(), setting.model(), defaultdict(float)
    engine.wants_block_norms = True
    result = engine.step(setting.steps[0], 1e-3)
    images, targets = setting.whole()[0]
    cross_entropy(model(images), targets).backward()
    for name, parameter in model.named_parameters():
        squares[name[: 8 if name.startswith("blocks") else name.index(".")]] += float(parameter.grad.norm() ** 2)
    found = dict(zip(engine.blocks(), result.block_norms.square().tolist(), strict=True))
    assert found == pytest.approx(squares, rel=1e-4 if precision == "fp32" else 0.05)
    assert sum(found.values()) == pytest.approx(result.grad_norm.item() ** 2, rel=1e-5)


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
