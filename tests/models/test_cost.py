"""Costs by formula against counted modules, PyTorch's FLOP counter, saved tensors and the papers' figures."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import widemix  # noqa: F401  puts our names into timm's registry
from tests.models.test_mixer import SHAPE, STRUCTURED, VARIANTS
from widemix.models.bottleneck_mlp.section import BottleneckMlpSection
from widemix.models.cost import model_cost
from widemix.models.families import KINDS, named_networks
from widemix.models.ff_only.section import FfOnlySection
from widemix.models.lasso.section import LassoSection
from widemix.models.layer_costs import LayerCost
from widemix.models.layers import GroupedLinear
from widemix.models.mixer.section import MixerSection
from widemix.models.permutator.section import PermutatorSection
from widemix.models.registry import build_model
from widemix.models.repmlp.section import RepMlpSection
from widemix.models.shallow.section import ShallowSection
from widemix.models.sw_mlp.section import SwMlpSection
from widemix.models.sw_mlp.sparse import SparseLinear
from widemix.models.text.section import TextMixerSection, TextTransformerSection
from widemix.models.timm_model.section import TimmSection

B16 = {
    "kind": "mixer",
    "patch_size": 16,
    "tokens": 196,
    "channels": 768,
    "depth": 12,
    "token_hidden": 384,
    "channel_hidden": 3072,
}
B_W = {"kind": "mixer", "patch_size": 14, "tokens": 256, "channels": 588, "depth": 8, "expansion": 4.57}


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


MIXERS = {name: MixerSection(**{**SHAPE, **keys}) for name, keys in (VARIANTS | STRUCTURED).items()}
OTHERS = {
    "sw_mlp": SwMlpSection(kind="sw_mlp", patch_size=2, width=32, depth=2, density=0.2),
    "sw_mlp with hidden layers": SwMlpSection(
        kind="sw_mlp", patch_size=2, width=30, project_tokens=True, depth=3, density=0.1, expansion=1.5, mask_seed=3
    ),
    "sw_mlp as a Mixer": SwMlpSection(
        kind="sw_mlp",
        patch_size=2,
        width=32,
        channels=8,
        depth=2,
        density=0.5,
        expansion=1.5,
        pool=True,
        outer_activation=False,
    ),
    "shallow dense": ShallowSection(kind="shallow", width=30, matrices="dense"),
    "shallow monarch": ShallowSection(kind="shallow", width=30, matrices="monarch"),
    "shallow kronecker": ShallowSection(kind="shallow", width=30, matrices="kronecker"),
    "shallow grayscale": ShallowSection(kind="shallow", width=30, matrices="monarch", grayscale=True),
    "s_fc": LassoSection(kind="s_fc", base_channels=3),
    "s_local": LassoSection(kind="s_local", base_channels=3),
    "bottleneck_mlp": BottleneckMlpSection(kind="bottleneck_mlp", width=6, depth=2, expansion=1.5),
    "ff_only": FfOnlySection(kind="ff_only", patch_size=1, channels=8, depth=2),
    "permutator": PermutatorSection(kind="permutator", patch_size=1, channels=8, depth=2),
    "repmlp": RepMlpSection(kind="repmlp", patch_size=1, channels=8, depth=2, share_sets=2, kernels=[1, 3]),
    "text_mixer": TextMixerSection(kind="text_mixer", vocabulary=11, tokens=7, channels=6, depth=2),
    "text_transformer": TextTransformerSection(
        kind="text_transformer", vocabulary=11, tokens=7, channels=8, depth=2, heads=4
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("section", MIXERS.values(), ids=MIXERS)
def test_formula_equals_the_counted_network(section):
    assert_is_counted(section)


@pytest.mark.parametrize("section", OTHERS.values(), ids=OTHERS)
def test_formula_of_another_family_equals_the_counted_network(section):
    assert_is_counted(section)


def assert_is_counted(section):
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if section.kind == "text_transformer" and attention not in flop_registry:
        pytest.skip("this torch does not count the operations of attention on a CPU")
    model, cost = build_model(section, image_size=4, num_classes=5), model_cost(section, image_size=4, num_classes=5)
    assert section.layer_costs(4, 5) is not None, "it is counted by the same code"
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, SparseLinear):  # a GPU multiplies these by dense copies
            module.rule_device = torch.device("cuda")
    x = torch.randint(1, 11, (8, 7)) if section.kind.startswith("text") else torch.randn(8, 3, 4, 4)
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


@pytest.mark.parametrize("section", VARIANTS.values(), ids=VARIANTS)
def test_connections_are_the_nonzero_entries_of_the_effective_matrices(section):
    """By differentiating: each mixing layer is linear, and the entries of its Jacobian are counted."""
    section = MixerSection(**{**SHAPE, **section})
    model, cost = build_model(section, image_size=4, num_classes=5), model_cost(section, image_size=4, num_classes=5)
    nonzero = entries = layers = 0
    shapes = {}
    for name, module in model.named_modules():
        if name.startswith("blocks") and isinstance(module, torch.nn.Linear | GroupedLinear) and "skip" not in name:
            module.register_forward_hook(lambda m, i, o, name=name: shapes.update({name: i[0].shape[1:]}))
    model(torch.randn(1, 3, 4, 4))
    for name, shape in shapes.items():
        layer = model.get_submodule(name)
        jacobian = torch.func.jacrev(lambda x, layer=layer: layer(x[None])[0])(torch.randn(shape))
        nonzero += int((jacobian != 0).sum())
        entries += jacobian.numel()
        layers += 1
    assert cost.connections == nonzero
    assert cost.omega == nonzero / layers
    assert cost.density == pytest.approx(nonzero / entries, rel=1e-12)


def test_published_figures():
    b16 = model_cost(MixerSection(**B16), 224, 1000)
    assert b16.parameters == 59_880_472
    assert b16.omega == pytest.approx(2.60e8, rel=1e-3)
    assert b16.width == 150_528
    assert b16.gamma == pytest.approx(2 * b16.omega / (b16.width * (196 + 768)))
    assert b16.max_width == 602_112  # table 1: 6.0e5
    assert b16.training_flops == pytest.approx(75.4e9, rel=1e-3)
    assert model_cost(MixerSection(**B16, permutation="random"), 224, 1000) == b16

    text = model_cost(MixerSection(**B_W), 224, 1000)
    assert text.omega == pytest.approx(2.90e8, rel=2e-3)
    assert text.max_width == pytest.approx(6.88e5, rel=2e-3)
    assert text.gamma == 4.57
    table = model_cost(MixerSection(**{**B_W, "expansion": 4.09}), 224, 1000)
    assert table.omega == pytest.approx(2.6e8, rel=2e-3)
    assert table.max_width == pytest.approx(6.2e5, rel=1e-2)


@pytest.mark.parametrize(("kind", "expansion"), [("mixer", 2.0), ("s_mixer", None)])
def test_gamma_does_not_depend_on_the_images_own_tokens(kind, expansion):
    """Omega does: the first token mixing maps S0 = 64 to S = 360 tokens. gamma m is the width of figure 4."""
    sizes = {"patch_size": 4, "tokens": 360, "channels": 4, "depth": 3, "project_tokens": True}
    cost = model_cost(MixerSection(kind=kind, expansion=expansion, **sizes), 32, 10)
    assert (cost.gamma, cost.hidden_width) == (expansion or 1, (expansion or 1) * 4 * 360)


@pytest.mark.parametrize(("kind", "tokens"), [("ff_only", 65), ("permutator", 64), ("repmlp", 64)])
def test_gamma_of_others_is_that_of_a_mixer_with_as_many_connections(kind, tokens):
    """Omega = gamma m (S + C) / 2; the class token is one of FF-only's."""
    sizes = {"kind": kind, "patch_size": 1, "channels": 8, "depth": 2}
    cost = model_cost(KINDS[kind](**sizes, **({"share_sets": 2} if kind == "repmlp" else {})), 8, 10)
    assert cost.width == tokens * 8
    assert cost.gamma == pytest.approx(2 * cost.omega / (cost.width * (tokens + 8)))
    if kind == "ff_only":
        assert cost.gamma == 4  # its expansion


def test_s_fc_has_the_connections_of_table_1():
    assert round(model_cost(LassoSection(kind="s_fc", base_channels=150), 32, 10).connections / 1e6) == 256


@pytest.mark.parametrize(
    ("patch", "tokens", "channels", "millions"), [(8, 16, 986, 253), (4, 64, 487, 275), (4, 64, 467, 254)]
)
def test_connections_of_the_cifar_mixers(patch, tokens, channels, millions):
    """SS/8, SS-W as its text has it, and SS-W whose patch layer's 1.4 M more make its table's 255 M."""
    section = MixerSection(kind="mixer", patch_size=patch, tokens=tokens, channels=channels, depth=2, expansion=4)
    assert round(model_cost(section, 32, 10).connections / 1e6) == millions


@pytest.mark.parametrize("size", ["s32", "b16", "ss8"])
def test_timms_networks_are_counted_as_the_formulas_say(size):
    """The same Mixer by our formula and, under timm's name, by a step without memory."""
    name = {"s32": "mixer_s32_224", "b16": "mixer_b16_224", "ss8": "mixer_ss8_32"}[size]
    formula = model_cost(*named_networks()[name], 10)
    counted = model_cost(TimmSection(kind="timm", name=name), named_networks()[name][1], 10)
    for quantity in ("parameters", "forward_flops", "training_flops", "activation_bytes", "dense_bytes"):
        assert getattr(counted, quantity) == getattr(formula, quantity), quantity
    assert math.isnan(counted.omega)


@pytest.mark.parametrize("name", named_networks())
def test_every_named_network_has_the_parameters_that_its_cost_says(name):
    section, side = named_networks()[name]
    one_block = section.model_copy(update={"depth": 1}) if hasattr(section, "depth") else section
    with torch.device("meta"):
        model = build_model(one_block, side, 7)
    assert model_cost(one_block, side, 7).parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("section", "width", "gamma", "widest", "connections", "entries"),
    [
        (  # the first block maps 4 tokens of 8 channels to m
            SwMlpSection(
                kind="sw_mlp",
                patch_size=2,
                width=30,
                channels=8,
                depth=2,
                density=1.0,
                expansion=1.5,
                project_tokens=True,
            ),
            30,
            1.5,
            45,
            [32 * 45, 45 * 30, 30 * 45, 45 * 30],
            [32 * 45, 45 * 30, 30 * 45, 45 * 30],
        ),
        (
            SwMlpSection(kind="sw_mlp", patch_size=2, width=32, depth=2, density=1.0),
            32,
            1.0,
            32,
            [32 * 32] * 2,
            [32 * 32] * 2,
        ),
        (
            ShallowSection(kind="shallow", width=32, matrices="dense"),
            32,
            1.0,
            32,
            [48 * 32, 32 * 32],
            [48 * 32, 32 * 32],
        ),
        (  # 48 = 6 x 8 pixels, 30 = 5 x 6 features, and 6 x 6 between the two factors of the first matrix
            ShallowSection(kind="shallow", width=30, matrices="monarch"),
            30,
            1.0,
            36,
            [6 * 8 * 6, 6 * 6 * 5, 5 * 6 * 6, 6 * 5 * 5],
            [48 * 36, 36 * 30, 30 * 30, 30 * 30],
        ),
        (LassoSection(kind="s_fc", base_channels=3), 12, 1.0, 72, [48 * 12, 12 * 72], [48 * 12, 12 * 72]),
        (
            BottleneckMlpSection(kind="bottleneck_mlp", width=6, depth=2, expansion=1.5),
            6,
            1.5,
            9,
            [6 * 9, 9 * 6] * 2,
            [6 * 9, 9 * 6] * 2,
        ),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_widths_and_connections_of_mlps(section, width, gamma, widest, connections, entries):
    cost = model_cost(section, 4, 10)
    assert (cost.width, cost.gamma, cost.hidden_width, cost.max_width) == (width, gamma, gamma * width, widest)
    assert (cost.connections, cost.omega) == (sum(connections), sum(connections) / len(connections))
    assert cost.density == sum(connections) / sum(entries)
