"""Static-mask layers against dense masked matrices."""

import copy

import numpy as np
import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

import widemix  # noqa: F401  puts our names into timm's registry
from widemix.models.cost import model_cost
from widemix.models.registry import build_model
from widemix.models.sw_mlp import sparse
from widemix.models.sw_mlp.section import SwMlpSection
from widemix.models.sw_mlp.sparse import SparseLinear, multiplies_sparsely
from widemix.recipe import load_recipe

SECTION = SwMlpSection(
    kind="sw_mlp", patch_size=2, width=32, channels=8, depth=2, density=0.2, expansion=1.5, mask_seed=4
)


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


@pytest.mark.one_in(5)
@pytest.mark.parametrize("density", [0.2, 1.0])
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("projects", [False, True])
@pytest.mark.parametrize("form", ["S.16", "S.17", "C.1"])
def test_network_is_the_papers_formula(density, pool, projects, form):
    """Patch layer (S.1), vectorisation, blocks of equations S.16, S.17 or, as C.1 has them, a Mixer's, LN, head."""
    section = SwMlpSection(
        **SECTION.model_dump()
        | {"density": density, "pool": pool, "project_tokens": projects, "width": 24 if projects else 32}
        | {"expansion": None if form == "S.16" else 1.5, "outer_activation": form != "C.1"}
    )
    model = build_model(section, image_size=4, num_classes=5).double()
    torch.nn.init.normal_(model.head.weight)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(3, 3, 4, 4, dtype=torch.float64)
    patches = x.unflatten(2, (2, 2)).unflatten(4, (2, 2)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    z = (patches @ model.stem.proj.weight.flatten(1).T + model.stem.proj.bias).flatten(1)  # [3, 4 * 8]
    gelu = torch.nn.functional.gelu
    for number, block in enumerate(model.blocks):
        mixed = gelu(block.norm(z) @ masked(block.fc1).T + block.fc1.bias)
        if form != "S.16":
            mixed = mixed @ masked(block.fc2).T + block.fc2.bias
        if form == "S.17":
            mixed = gelu(mixed)
        skip = z
        if projects and number == 0:
            skip = block.skip.norm(z @ masked(block.skip.fc).T)
        z = skip + mixed
    if pool:
        tokens = torch.nn.functional.layer_norm(
            z.unflatten(1, (-1, 8)), (8,), model.norm.norm.weight, model.norm.norm.bias, model.norm.norm.eps
        )
        features = tokens.mean(1)
    else:
        features = model.norm(z)
    assert torch.allclose(model.forward_features(x), features, atol=1e-12)
    assert torch.allclose(model(x), features @ model.head.weight.T + model.head.bias, atol=1e-12)
    if density == 1.0 and form != "S.16":
        assert masked(model.blocks[1].fc1).count_nonzero() == section.width * section.hidden_width


def test_weights_lie_in_the_masked_layers():
    """Figure 5: at every width the masked layers hold Omega = 2^18 connections a block, and nearly all weights."""
    for width, density in ((540, 0.9), (612, 0.7), (724, 0.5), (935, 0.3), (1619, 0.1)):
        section = SwMlpSection(
            kind="sw_mlp", patch_size=4, width=width, depth=8, density=density, project_tokens=True
        )
        cost = model_cost(section, 32, 10)
        assert cost.omega == pytest.approx(2**18, rel=0.02)
        assert cost.connections > 0.85 * cost.parameters


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
    assert multiplies_sparsely(cpu, 0.1, 1619**2, rows=256)
    assert not multiplies_sparsely(cpu, 0.3, 1619**2, rows=128)
    assert not multiplies_sparsely(cpu, 0.1, 1619**2, rows=256, dtype=torch.bfloat16)
    assert not multiplies_sparsely(cpu, 0.5, 1619**2)
    assert not multiplies_sparsely(gpu, 0.1, 8192 * 16384)
    assert multiplies_sparsely(gpu, 0.1, 150_528**2)
    assert multiplies_sparsely(cpu, 0.3, 1619**2, rows=100)
    assert not multiplies_sparsely(cpu, 0.31, 1619**2)
    assert not multiplies_sparsely(cpu, 0.1, 1619**2, rows=256, dtype=torch.float16)
    assert multiplies_sparsely(cpu, 0.1, 1619**2, rows=256, dtype=torch.float64)
    for device in (cpu, gpu):
        assert multiplies_sparsely(device, 0.9, 2**28 + 1, rows=10**6)
        assert not multiplies_sparsely(device, 0.9, 2**28)


@pytest.mark.parametrize(
    ("autocast", "rows", "sparsely"),
    [(True, 100, True), (True, 101, False), (False, 300, True), (False, 301, False)],
)
def test_a_layer_multiplies_by_the_rule_of_its_rows_and_precision(autocast, rows, sparsely):
    layer = SparseLinear(20, 30, 0.1, (1,))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = layer(torch.randn(rows, 20))
    assert output.grad_fn.name() == ("AddBackward0" if sparsely else "AddmmBackward0")


def test_a_step_fits_24_gib_with_adam():
    """Figure 2a at p = 1: weights, gradients, two moments and masks (28 bytes a weight), copies, batch 128."""
    for density in (1.0, 1 / 64):
        section = SwMlpSection(**SwMlpSection.named()["sw_mlp_4096_32"][0].model_dump() | {"density": density})
        cost = model_cost(section, 32, 10)
        assert cost.omega == pytest.approx(density * 4096 * 8192, rel=0.01)
        assert 28 * cost.parameters + cost.dense_bytes + 128 * cost.activation_bytes < 24 * 2**30


def test_table_s3_counts_dense_products_and_a_mask_entry_a_weight():
    """The CIFAR column of table S.3 at S = C = 64, gamma 2: 805 M FLOPs, 3.22 GB of weights and masks in fp32."""
    section = SwMlpSection.named()["sw_mlp_4096_32"][0]
    cost = model_cost(section, 32, 10)
    assert section.depth * 2 * (2 * 2 * 4096**2) == 805_306_368
    assert cost.forward_flops == pytest.approx(805e6, rel=2e-3)
    assert 2 * cost.dense_bytes == pytest.approx(3.22e9, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "recipe"), [("sw_mlp_1619_32", "cifar10/sw_mlp"), ("sw_mlp_4096_32", "cifar10/figure2a_sw_mlp")]
)
def test_named_networks_are_those_of_the_recipes(name, recipe):
    """But for timm's epsilon, and the projection of the first block."""
    others = {"norm_eps", "project_tokens"}
    named, _ = SwMlpSection.named()[name]
    assert named.model_dump(exclude=others) == load_recipe(recipe).model.model_dump(exclude=others)


def test_named_sizes_have_their_connections():
    for name, omega in (("sw_mlp_1619_32", 2**18), ("sw_mlp_4096_32", 2**19)):
        with torch.device("meta"):
            model = timm.create_model(name, depth=2)
        layers = [module for module in model.blocks[1].modules() if isinstance(module, SparseLinear)]
        assert np.mean([len(layer.values) for layer in layers]) == pytest.approx(omega, rel=0.01)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"width": 30}, "model.width 30: 4 patches of 8 channels have 32 features"),
        ({"channels": None, "width": 33}, "model.width 33: 4 patches of 8 channels have 32 features"),
        ({"pool": True, "width": 30}, "width 30 must be a multiple of channels 8"),
        ({"pool": True, "channels": None}, "width 32 must be a multiple of channels None"),
        ({"expansion": None, "outer_activation": False}, "single layers have one activation"),
    ],
)
def test_what_does_not_fit_is_refused(keys, words):
    with pytest.raises(ValueError, match=words):
        SwMlpSection(**SECTION.model_dump() | keys).check_image_size(4)


def test_masks_are_the_same_with_every_numpy():
    """In these rows numpy 2.5's Generator.binomial has other counts than 2.4's."""
    layer = SparseLinear(3072, 1500, 1 / 32, (0, 0, 0))
    assert layer.row_starts.diff()[1494:].tolist() == [97, 120, 90, 84, 93, 93]
    assert layer.columns.sum() == 220421641


def test_biases_start_at_zero_and_the_skip_has_none():
    section = SECTION.model_copy(update={"project_tokens": True, "width": 30})
    block = build_model(section, image_size=4, num_classes=5).blocks[0]
    assert block.skip.fc.bias is None
    assert not torch.cat([block.fc1.bias, block.fc2.bias]).any()


def test_every_mask_of_a_network_is_another():
    """By the seed, the block and the place in it."""

    def masks(seed):
        section = SECTION.model_copy(update={"project_tokens": True, "expansion": 1.0, "mask_seed": seed})
        network = build_model(section, image_size=4, num_classes=5)
        return [module.dense_weight() != 0 for module in network.modules() if isinstance(module, SparseLinear)]

    found = [*masks(4), *masks(5)]
    assert {mask.shape for mask in found} == {(32, 32)}
    assert len({tuple(mask.flatten().tolist()) for mask in found}) == len(found) == 10
    assert all(map(torch.equal, masks(4), found))


@pytest.mark.parametrize("pool", [False, True])
def test_every_norm_has_the_epsilon_of_the_section(pool):
    """The two at the blocks, that of the projected skip, and the last."""
    section = SECTION.model_copy(update={"project_tokens": True, "pool": pool, "norm_eps": 0.125})
    network = build_model(section, image_size=4, num_classes=5)
    norms = [module.eps for module in network.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert norms == [0.125] * 4


@pytest.mark.parametrize(("width", "channels"), [(35, 9), (33, 8), (1, 1)])
def test_tokens_have_the_channels_that_are_nearest_to_the_width(width, channels):
    section = SECTION.model_copy(update={"channels": None, "project_tokens": True, "width": width})
    assert section.patch_channels(4) == channels
    assert build_model(section, image_size=4, num_classes=5).stem.proj.out_channels == channels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_sparse_product_and_its_gradients_have_the_type_of_what_goes_in(dtype):
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
