"""Static-mask layers against dense masked matrices."""

import copy

import numpy as np
import pytest
import timm
import torch

from pipeline.models.cost import model_cost
from pipeline.models.registry import build_model
from pipeline.models.sw_mlp import network as sparse
from pipeline.models.sw_mlp.network import SparseLinear, multiplies_sparsely
from pipeline.models.sw_mlp.section import SwMlpSection

SECTION = SwMlpSection(kind="sw_mlp", width=30, depth=2, density=0.2, expansion=1.5, mask_seed=4)


def masked(layer):
    """The layer's matrix, place by place."""
    weight = torch.zeros(layer.outputs, layer.inputs, dtype=layer.values.dtype)
    for row in range(layer.outputs):
        for place in range(layer.row_starts[row], layer.row_starts[row + 1]):
            weight[row, layer.columns[place]] = layer.values[place]
    return weight


@pytest.mark.parametrize("sparsely", [True, False])
def test_layer_is_its_masked_matrix_forward_and_backward(sparsely, monkeypatch):
    monkeypatch.setattr(sparse, "multiplies_sparsely", lambda *_: sparsely)
    layer = SparseLinear(23, 31, 0.3, (1,)).double()
    x = torch.randn(5, 23, dtype=torch.float64, requires_grad=True)
    weight = masked(layer).detach().requires_grad_()
    ours, dense = layer(x), x @ weight.T + layer.bias
    assert torch.allclose(ours, dense, atol=1e-12)
    target = torch.randn_like(ours)
    for_x, for_values = torch.autograd.grad(ours, [x, layer.values], target)
    for_x_dense, for_weight = torch.autograd.grad(dense, [x, weight], target)
    assert torch.allclose(for_x, for_x_dense, atol=1e-12)
    row = torch.arange(31).repeat_interleave(layer.row_starts.diff())
    assert torch.allclose(for_values, for_weight[row, layer.columns], atol=1e-12)
    assert torch.equal(layer.dense_weight(), weight)


def test_mask_is_bernoulli_and_a_function_of_its_key():
    layer = SparseLinear(400, 300, 0.1, (3, 1))
    mask = layer.dense_weight() != 0
    assert len(layer.values) == mask.sum()
    assert mask.float().mean().item() == pytest.approx(0.1, abs=4 * (0.09 / mask.numel()) ** 0.5)
    for counts in (mask.sum(0), mask.sum(1)):  # binomial in rows and columns alike
        assert counts.float().var().item() == pytest.approx(0.09 * mask.numel() / len(counts), rel=0.35)
    assert torch.equal(mask, SparseLinear(400, 300, 0.1, (3, 1)).dense_weight() != 0)
    assert not torch.equal(mask, SparseLinear(400, 300, 0.1, (3, 2)).dense_weight() != 0)
    assert layer.values.std().item() * (0.1 * 400) ** 0.5 == pytest.approx(1, abs=0.03)


def test_block_is_the_papers_formula_and_density_one_the_dense_mlp():
    for density in (0.2, 1.0):
        section = SECTION.model_copy(update={"density": density})
        model = build_model(section, image_size=4, num_classes=5).double()
        x = torch.randn(3, 3, 4, 4, dtype=torch.float64)
        z = model.stem(x.flatten(1))
        for block in model.blocks:
            hidden = torch.nn.functional.gelu(block.norm(z) @ masked(block.fc1).T + block.fc1.bias)
            z = z + hidden @ masked(block.fc2).T + block.fc2.bias
        assert torch.allclose(model.forward_features(x), model.norm(z), atol=1e-12)
    assert masked(model.blocks[0].fc1).count_nonzero() == 30 * 45


def test_mask_travels_with_the_weights():
    one = build_model(SECTION, image_size=4, num_classes=5)
    other = build_model(SECTION.model_copy(update={"mask_seed": 4, "density": 0.2}), image_size=4, num_classes=5)
    torch.nn.init.normal_(one.head.weight)
    other.load_state_dict(one.state_dict())
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(one(x), other(x))
    assert torch.equal(copy.deepcopy(one)(x), one(x))


def test_a_step_never_leaves_the_mask():
    model = build_model(SECTION, image_size=4, num_classes=5)
    torch.nn.init.normal_(model.head.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model.blocks[0].fc1.dense_weight().detach()
    model(torch.randn(2, 3, 4, 4)).square().sum().backward()
    optimizer.step()
    after = model.blocks[0].fc1.dense_weight().detach()
    assert torch.equal(before == 0, after == 0)
    assert not torch.equal(before, after)


def test_half_precision_and_compilation():
    model = build_model(SECTION, image_size=4, num_classes=5)
    torch.nn.init.normal_(model.head.weight)
    x = torch.randn(2, 3, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(model(x).float(), model(x.float()).float(), rtol=0.05, atol=0.05)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), model(x), atol=1e-5)
    compiled(x).sum().backward()
    assert model.blocks[0].fc1.values.grad.count_nonzero() > 0


def test_rule_for_the_product():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert multiplies_sparsely(cpu, 0.1, 1619**2)
    assert not multiplies_sparsely(cpu, 0.5, 1619**2)
    assert not multiplies_sparsely(gpu, 0.1, 8192 * 16384)
    assert multiplies_sparsely(gpu, 0.1, 150_528**2)


def test_big_ones_fit_24_gib_with_adam_and_a_batch():
    """Weights, gradients, two moments and masks (28 bytes a weight), dense copies (GPU), activations at batch 128."""
    for width, density, expansion in ((1619, 0.1, None), (8192, 1 / 64, 2.0)):
        section = SwMlpSection(kind="sw_mlp", width=width, depth=6, density=density, expansion=expansion)
        cost = model_cost(section, 32, 10)
        layers = 6 * (2 if expansion else 1)
        dense_copies = layers * width * section.hidden_width * 4
        assert cost.omega == pytest.approx(density * width * section.hidden_width, rel=0.01)
        assert 28 * cost.parameters + dense_copies + 128 * cost.activation_bytes < 24 * 2**30


def test_named_sizes_have_their_connections():
    for name, omega in (("sw_mlp_1619_32", 2**18), ("sw_mlp_8192_32", 2**21)):
        with torch.device("meta"):
            model = timm.create_model(name, depth=1)
        layers = [module for module in model.modules() if isinstance(module, SparseLinear)]
        assert np.mean([len(layer.values) for layer in layers]) == pytest.approx(omega, rel=0.01)
