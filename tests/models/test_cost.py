"""Costs by formula against counted modules, PyTorch's FLOP counter, saved tensors and the papers' figures."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from tests.models.networks import MIXERS, NETWORKS, OTHERS, VARIANTS
from widemix.errors import InputError
from widemix.models.cost import model_cost
from widemix.models.families import KINDS, named_networks
from widemix.models.layer_costs import LayerCost, pairs, tokens_of, widest
from widemix.models.layers import GroupedLinear
from widemix.models.mixer.section import MixerSection
from widemix.models.plain_mlps.network import LocallyConnected
from widemix.models.registry import build_model
from widemix.models.sw_mlp.section import SwMlpSection
from widemix.models.sw_mlp.sparse import SparseLinear
from widemix.models.timm_networks.section import TimmSection


def saved_bytes(model, x):
    """Bytes of the tensors that autograd keeps for the backward pass, weights and permutations left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(kept.values())


def overcounted(section):
    """PyTorch's counter takes a grouped convolution's weight gradient for a whole one's, G times too much."""
    if section.kind != "repmlp":
        return 0
    places = section.channels * (4 // section.patch_size) ** 2
    once = sum(2 * places * side**2 for side in section.kernels) * section.depth
    return once * (section.share_sets - 1)


# Batches of texts of one length, as autograd counts padding too.
COUNTED = ["sw_mlp S.16, p 0.2", "sw_mlp S.17, p 0.2, projected", "sw_mlp C.1, p 1.0, pooled", *MIXERS, *OTHERS]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", COUNTED)
def test_formula_equals_the_counted_network(name):
    section = NETWORKS[name]
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if section.kind == "text_transformer" and attention not in flop_registry:
        pytest.skip("this torch does not count the operations of attention on a CPU")
    model, cost = build_model(section, image_size=4, num_classes=5), model_cost(section, image_size=4, num_classes=5)
    assert section.layer_costs(4, 5) is not None, "it is counted by the same code"
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, SparseLinear):  # a GPU multiplies these by dense copies
            module.rule_device = torch.device("cuda")
    x = torch.randint(1, 11, (8, 9)) if section.takes == "text" else torch.randn(8, 3, 4, 4)
    with FlopCounterMode(display=False) as counter:
        output = model(x)
        forward = counter.get_total_flops()
        output.sum().backward()
    assert cost.forward_flops * 8 == forward
    assert cost.training_flops * 8 + overcounted(section) * 8 == counter.get_total_flops()
    assert cost.activation_bytes * 4 == saved_bytes(model, x) - saved_bytes(
        model, x[:4].clone()
    )  # batch norms keep more


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("activated", [False, True])
def test_a_layer_saves_and_multiplies_as_torch_does(first, activated):
    """As the defaults say: its input is saved, its output where an activation follows; two products backwards."""
    layer, x = torch.nn.Linear(5, 7), torch.randn(3, 5, requires_grad=not first)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        y = layer(x)
        loss = torch.nn.functional.gelu(y) if activated else y
    with FlopCounterMode(display=False) as backward:
        loss.sum().backward()
    choices = ({"activated": True} if activated else {}) | ({"input_gradient": False} if first else {})
    cost = LayerCost(3, 5, 7, **choices)
    assert cost.saved == sum(t.numel() for t in saved.values()) - (0 if first else layer.weight.numel())
    assert cost.backward_products == backward.get_total_flops() // (2 * 3 * 5 * 7)
    assert cost.parameters == sum(p.numel() for p in layer.parameters())
    assert cost.mixes


@pytest.mark.parametrize(
    ("name", "side"), [*((name, 4) for name in VARIANTS), *(("s_local", side) for side in (4, 7, 8, 16))]
)
def test_connections_are_the_nonzero_entries_of_the_effective_matrices(name, side):
    """By differentiating: each mixing layer is linear, and the entries of its Jacobian are counted.

    Windows of s_local overlap, and weights of the border around the image connect nothing.
    """
    section, shapes, nonzero, entries = NETWORKS[name], {}, 0, 0
    model, cost = build_model(section, side, 5), model_cost(section, side, 5)
    for layer, module in model.named_modules():
        if (
            isinstance(module, nn.Linear | GroupedLinear | LocallyConnected)
            and layer != "head"
            and "skip" not in layer
        ):
            module.register_forward_hook(lambda m, i, o, layer=layer: shapes.update({layer: i[0].shape[1:]}))
    model.eval()(torch.randn(1, 3, side, side))
    for layer, shape in shapes.items():
        module = model.get_submodule(layer)
        jacobian = torch.func.jacrev(lambda x, module=module: module(x[None])[0])(torch.randn(shape))
        nonzero += int((jacobian != 0).sum())
        entries += jacobian.numel()
    assert cost.connections == nonzero
    assert cost.omega == nonzero / len(shapes)
    assert cost.density == pytest.approx(nonzero / entries, rel=1e-12)


B16 = {"kind": "mixer", "patch_size": 16, "channels": 768, "depth": 12}
B16 |= {"token_hidden": 384, "channel_hidden": 3072}
RANDOM = {"permutation": "random"}
B_W = {"kind": "mixer", "patch_size": 14, "channels": 588, "depth": 8, "expansion": 4.57}
SS_8 = {"kind": "mixer", "patch_size": 8, "channels": 986, "depth": 2, "expansion": 4}
SS_W = SS_8 | {"patch_size": 4}
WIDE = {"patch_size": 4, "project_tokens": 360, "channels": 4, "depth": 3}
MASKED = {"kind": "sw_mlp", "patch_size": 4, "depth": 8, "project_features": True}
FIGURE_2A = SwMlpSection.named()["sw_mlp_4096_32"][0].model_dump()


@pytest.mark.parametrize(
    ("keys", "side", "published"),
    [
        # Table 1 of the paper, which has a maximal width of 6.0e5, and timm's own number of parameters.
        (
            B16,
            224,
            {"parameters": 59_880_472, "omega": 2.60e8, "width": 150_528, "gamma": 3.584, "training_flops": 75.4e9},
        ),
        (B16 | {"permutation": "random"}, 224, {"parameters": 59_880_472, "max_width": 602_112}),
        (B_W, 224, {"omega": 2.90e8, "max_width": 6.88e5, "gamma": 4.57}),
        (B_W | {"expansion": 4.09}, 224, {"omega": 2.6e8, "max_width": 6.16e5}),
        # SS/8, SS-W as its text has it, and SS-W whose patch layer's 1.4 M more make its table's 255 M.
        (SS_8, 32, {"connections": 253e6}),
        (SS_W | {"channels": 487}, 32, {"connections": 275e6}),
        (SS_W | {"channels": 467}, 32, {"connections": 254e6}),
        ({"kind": "s_fc", "base_channels": 150}, 32, {"connections": 256e6}),
        # The first token mixing maps S0 = 64 to S = 360 tokens; gamma m is the width of figure 4.
        ({"kind": "mixer", "expansion": 2.0, **WIDE}, 32, {"gamma": 2, "hidden_width": 2880}),
        ({"kind": "s_mixer", **WIDE}, 32, {"gamma": 1, "hidden_width": 1440}),
        # Figure 5: at every width the masked layers hold Omega = 2^18 connections a block.
        *(
            (MASKED | {"width": width, "density": density}, 32, {"omega": pytest.approx(2**18, rel=0.02)})
            for width, density in ((540, 0.9), (612, 0.7), (724, 0.5), (935, 0.3), (1619, 0.1))
        ),
        # The CIFAR column of table S.3, which counts dense products and a mask's entry a weight.
        (FIGURE_2A, 32, {"forward_flops": 805_306_368, "dense_bytes": 3.22e9 / 2}),
        *(
            (FIGURE_2A | {"density": p}, 32, {"omega": pytest.approx(p * 4096 * 8192, rel=0.01)})
            for p in (1.0, 1 / 64)
        ),
    ],
)
def test_costs_are_the_published_ones(keys, side, published):
    cost = model_cost(KINDS[keys["kind"]](**keys), side, 1000 if side == 224 else 10)
    for quantity, value in published.items():
        expected = pytest.approx(value, rel=2e-3) if isinstance(value, int | float) else value
        assert getattr(cost, quantity) == expected, quantity
    if keys["kind"] == "sw_mlp":
        assert cost.connections > 0.85 * cost.parameters
        # Figure 2a at p = 1: weights, gradients, two moments and masks (28 bytes a weight), copies, batch 128.
        assert 28 * cost.parameters + cost.dense_bytes + 128 * cost.activation_bytes < 24 * 2**30


@pytest.mark.parametrize(("kind", "tokens"), [("ff_only", 65), ("permutator", 64), ("repmlp", 64)])
def test_others_have_the_gamma_of_a_mixer_with_their_connections(kind, tokens):
    """Omega = gamma m (S + C) / 2; the class token is one of FF-only's."""
    cost = model_cost(NETWORKS[kind], 8, 10)
    assert cost.width == tokens * 8
    assert cost.gamma == pytest.approx(2 * cost.omega / (cost.width * (tokens + 8)))
    if kind == "ff_only":
        assert cost.gamma == 4  # its expansion


@pytest.mark.parametrize("size", ["s32", "b16", "ss8"])
def test_timms_networks_are_counted_as_the_formulas_say(size):
    """The same Mixer by our formula and, under timm's name, by a step without memory."""
    name = {"s32": "mixer_s32_224", "b16": "mixer_b16_224", "ss8": "mixer_ss8_32"}[size]
    formula = model_cost(*named_networks()[name], 10)
    counted = model_cost(TimmSection(kind="timm", name=name), named_networks()[name][1], 10)
    for quantity in ("parameters", "forward_flops", "training_flops", "activation_bytes", "dense_bytes"):
        assert getattr(counted, quantity) == getattr(formula, quantity), quantity
    assert math.isnan(counted.omega)


DENSE = {"kind": "sw_mlp", "patch_size": 2, "width": 32, "channels": 8, "depth": 2, "density": 1.0, "expansion": 1.5}


@pytest.mark.parametrize(
    ("keys", "width", "gamma", "widest", "entries"),
    [
        # The first block maps 4 tokens of 8 channels to m.
        (DENSE | {"width": 30, "project_features": True}, 30, 1.5, 45, [32 * 45, 45 * 30, 30 * 45, 45 * 30]),
        (DENSE | {"expansion": None}, 32, 1.0, 32, [32 * 32] * 2),
        ({"kind": "shallow", "width": 32, "matrices": "dense"}, 32, 1.0, 32, [48 * 32, 32 * 32]),
        # 48 = 6 x 8 pixels, 30 = 5 x 6 features, and 6 x 6 between the two factors of the first matrix.
        ({"kind": "shallow", "width": 30, "matrices": "monarch"}, 30, 1.0, 36, [48 * 36, 36 * 30, 30 * 30, 30 * 30]),
        ({"kind": "s_fc", "base_channels": 3}, 12, 1.0, 72, [48 * 12, 12 * 72]),
        ({"kind": "bottleneck_mlp", "width": 6, "depth": 2, "expansion": 1.5}, 6, 1.5, 9, [6 * 9, 9 * 6] * 2),
    ],
)
def test_widths_and_connections_of_mlps(keys, width, gamma, widest, entries):
    cost = model_cost(KINDS[keys["kind"]](**keys), 4, 10)
    connections = [6 * 8 * 6, 6 * 6 * 5, 5 * 6 * 6, 6 * 5 * 5] if keys.get("matrices") == "monarch" else entries
    assert (cost.width, cost.gamma, cost.hidden_width, cost.max_width) == (width, gamma, gamma * width, widest)
    assert (cost.connections, cost.omega) == (sum(connections), sum(connections) / len(connections))
    assert cost.density == sum(connections) / sum(entries)


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
        shape = {"project_tokens": tokens, "channels": channels, "depth": 2}
        cost = model_cost(MixerSection(kind="mixer", patch_size=1, expansion=2, **shape), 1, 10)
        first = 2 * channels * tokens * (tokens - 1) / 8  # the first layer maps one token, not S
        half_a_token = 2 * (2 * channels * tokens + channels**2) / 4
        assert abs(cost.omega + first - 2**21) <= half_a_token
    assert pairs(2.0**18, 1, [64]) == [(64, 64)]
    assert pairs(300, 2, [12, 5]) == [(12, 2), (5, 6)]  # 12 * 1.8, 5 * 5.6: rounded to whole tokens
    assert pairs(1000, 1, [62]) == [(62, 1)]  # 0.52 tokens
    with pytest.raises(InputError, match="C = 63: at Omega = 1000, gamma = 1 less than one token"):
        pairs(1000, 1, [62, 63])
