"""Static-mask layers against dense masked matrices."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import widemix  # noqa: F401  puts our names into timm's registry
from tests.models.dense import masked
from widemix.models.registry import build_model
from widemix.models.sw_mlp.section import SwMlpSection
from widemix.models.sw_mlp.sparse import SparseLinear, multiplies_sparsely
from widemix.recipe import load_recipe

SECTION = SwMlpSection(
    kind="sw_mlp", patch_size=2, width=32, channels=8, depth=2, density=0.2, expansion=1.5, mask_seed=4
)


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


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "density", "entries", "keys", "sparsely"),
    [
        (CPU, 0.1, 1619**2, {"rows": 256}, True),
        (CPU, 0.1, 1619**2, {"rows": 256, "dtype": torch.float64}, True),
        (CPU, 0.1, 1619**2, {"rows": 256, "dtype": torch.bfloat16}, False),
        (CPU, 0.1, 1619**2, {"rows": 256, "dtype": torch.float16}, False),
        (CPU, 0.3, 1619**2, {"rows": 100}, True),
        (CPU, 0.3, 1619**2, {"rows": 128}, False),
        (CPU, 0.31, 1619**2, {}, False),
        (GPU, 0.1, 8192 * 16384, {}, False),
        (CPU, 0.9, 2**28 + 1, {"rows": 10**6}, True),
        (GPU, 0.9, 2**28 + 1, {"rows": 10**6}, True),
        (CPU, 0.9, 2**28, {}, False),
        (GPU, 0.9, 2**28, {}, False),
    ],
)
def test_rule_for_the_product(device, density, entries, keys, sparsely):
    assert multiplies_sparsely(device, density, entries, **keys) is sparsely


@pytest.mark.parametrize(
    ("autocast", "rows", "sparsely"), [(True, 100, True), (True, 101, False), (False, 300, True), (False, 301, False)]
)
def test_a_layer_multiplies_by_the_rule_of_its_rows(autocast, rows, sparsely):
    layer = SparseLinear(20, 30, 0.1, (1,))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = layer(torch.randn(rows, 20))
    assert output.grad_fn.name() == ("AddBackward0" if sparsely else "AddmmBackward0")


@pytest.mark.parametrize(
    ("name", "recipe"), [("sw_mlp_1619_32", "cifar10/sw_mlp"), ("sw_mlp_4096_32", "cifar10/figure2a_sw_mlp")]
)
def test_named_networks_are_those_of_the_recipes(name, recipe):
    """But for timm's epsilon, and the projection of the first block."""
    others = {"norm_eps", "project_features"}
    named, _ = SwMlpSection.named()[name]
    assert named.model_dump(exclude=others) == load_recipe(recipe).model.model_dump(exclude=others)


def test_masks_are_the_same_with_every_numpy():
    """In these rows numpy 2.5's Generator.binomial has other counts than 2.4's."""
    layer = SparseLinear(3072, 1500, 1 / 32, (0, 0, 0))
    assert layer.row_starts.diff()[1494:].tolist() == [97, 120, 90, 84, 93, 93]
    assert layer.columns.sum() == 220421641


def test_biases_start_at_zero_and_the_skip_has_none():
    section = SECTION.model_copy(update={"project_features": True, "width": 30})
    block = build_model(section, image_size=4, num_classes=5).blocks[0]
    assert block.skip.fc.bias is None
    assert not torch.cat([block.fc1.bias, block.fc2.bias]).any()


def test_every_mask_of_a_network_is_another():
    """By the seed, the block and the place in it."""

    def masks(seed):
        section = SECTION.model_copy(update={"project_features": True, "expansion": 1.0, "mask_seed": seed})
        network = build_model(section, image_size=4, num_classes=5)
        return [module.dense_weight() != 0 for module in network.modules() if isinstance(module, SparseLinear)]

    found = [*masks(4), *masks(5)]
    assert {mask.shape for mask in found} == {(32, 32)}
    assert len({tuple(mask.flatten().tolist()) for mask in found}) == len(found) == 10
    assert all(map(torch.equal, masks(4), found))


@pytest.mark.parametrize(("width", "channels"), [(35, 9), (33, 8), (1, 1)])
def test_tokens_have_the_channels_that_are_nearest_to_the_width(width, channels):
    section = SECTION.model_copy(update={"channels": None, "project_features": True, "width": width})
    assert section.patch_channels(4) == channels
    assert build_model(section, image_size=4, num_classes=5).stem.proj.out_channels == channels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_sparse_product_has_the_type_of_its_inputs(dtype):
    layer, x = SparseLinear(20, 30, 0.1, (1,)).to(dtype), torch.randn(4, 20, dtype=dtype, requires_grad=True)
    output = layer(x)
    assert output.grad_fn.name() == "AddBackward0"  # that of the bias, after the sparse product
    output.sum().backward()
    assert {output.dtype, x.grad.dtype, layer.values.grad.dtype} == {dtype}
    assert torch.allclose(output, x @ masked(layer).T + layer.bias, atol={2: 0.05, 4: 1e-5, 8: 1e-12}[dtype.itemsize])


def test_flops_of_a_sparse_product_are_those_of_its_values():
    layer, x = SparseLinear(20, 30, 0.1, (1,)), torch.randn(4, 20, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        output = layer(x)
        forward = counter.get_total_flops()
        output.sum().backward()
    assert forward == 2 * 4 * len(layer.values)
    assert counter.get_total_flops() == 3 * forward
