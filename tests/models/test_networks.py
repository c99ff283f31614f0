"""Every family: its formula written out, its first weights, what it refuses, and the files of other projects."""

import math
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from tests.models.dense import logits
from tests.models.networks import MASKED, NETWORKS, OTHERS, PATCHED, inputs_of, layers, random_model, section_of
from widemix.errors import InputError
from widemix.models.families import KINDS
from widemix.models.plain_mlps.network import BottleneckMlp
from widemix.models.registry import build_model
from widemix.models.section import hidden_width
from widemix.models.text.network import PAD
from widemix.training.finetune import load_init_weights

TEXTS = [name for name in OTHERS if name.startswith("text")]
BASELINES = ("mixer", "ff_only", "permutator", "repmlp")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.one_in(5)) if name in MASKED else name for name in NETWORKS]
)
def test_logits_and_gradients_are_those_of_the_formula(name):
    section = NETWORKS[name]
    model, x = random_model(section), inputs_of(section)
    weights = list(model.parameters())
    if x.is_floating_point():
        weights.append(x.requires_grad_())
    ours, expected = model(x), logits(section, model, x)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    target = torch.randn_like(ours)
    pairs = (torch.autograd.grad(each, weights, target, materialize_grads=True) for each in (ours, expected))
    for found, dense in zip(*pairs, strict=True):
        torch.testing.assert_close(found, dense, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name",
    [
        "sw_mlp C.1, p 0.2, projected",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("rp around each layer", "btt", *OTHERS)),
    ],
)
def test_networks_compile_without_graph_breaks(name):
    torch._dynamo.reset()  # of networks before: it compiles a function eight times at most
    section = NETWORKS[name]
    model, x = random_model(section), inputs_of(section)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = []
    for one in (compiled, model):
        model.zero_grad()
        output = one(x)
        output.square().sum().backward()
        gradients.append([output, *(parameter.grad for parameter in model.parameters())])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", BASELINES)
def test_first_weights_have_the_variance_of_their_inputs(name):
    torch.manual_seed(0)
    section = NETWORKS[name].model_copy(update={"patch_size": 2, "channels": 160, "expansion": 3.0})
    model = build_model(section, 8, 5)
    for layer in layers(model.blocks, nn.Linear):
        assert layer.weight.std().item() == pytest.approx(layer.in_features**-0.5, rel=0.2)
        assert layer.bias is None or not layer.bias.any()
    kernel = model.stem.proj
    assert kernel.weight.std().item() == pytest.approx((3 * 2 * 2) ** -0.5, rel=0.1)
    assert not torch.cat([kernel.bias, model.head.bias, model.head.weight.flatten()]).any()


@pytest.mark.parametrize(
    ("keys", "name", "deviation"),
    [
        ({"kind": "ff_only", "patch_size": 1, "channels": 400, "depth": 1}, "cls_token", 0.02),
        ({"kind": "ff_only", "patch_size": 1, "channels": 400, "depth": 1}, "pos_embed", 0.02),
        ({"kind": "s_local", "base_channels": 50}, "stem.0.weight", (3 * 9 * 9) ** -0.5),
        (OTHERS["text_transformer"] | {"channels": 64}, "positions", 0.02),
        (OTHERS["text_transformer"] | {"channels": 64}, "encoder.layers.0.self_attn.in_proj_weight", 1 / 8),
        (OTHERS["text_transformer"] | {"channels": 64}, "encoder.layers.1.self_attn.in_proj_weight", 1 / 8),
        (OTHERS["text_mixer"] | {"vocabulary": 3000}, "embedding.weight", 0.02),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else value,
)
def test_first_weights_have_their_deviation(keys, name, deviation):
    torch.manual_seed(0)
    model = build_model(section_of(keys), 8, 3)
    weight = model.get_parameter(name)
    assert weight.std().item() == pytest.approx(deviation, rel=0.15 if weight.numel() < 10_000 else 0.02)
    assert abs(weight.mean().item()) < 0.1 * deviation
    assert not model.head.weight.any()
    if name.startswith("encoder.layers.1"):  # torch.nn copies the first layer's weights to all
        assert not torch.equal(weight, model.get_parameter(name.replace("1", "0", 1)))
    if name == "embedding.weight":
        assert not weight[PAD].any()


@pytest.mark.parametrize("matrices", ["dense", "monarch", "kronecker"])
def test_features_of_shallow_networks_keep_their_variance(matrices):
    torch.manual_seed(0)
    model = build_model(section_of({"kind": "shallow", "width": 1024, "matrices": matrices}), 16, 5)
    hidden = model.stem[0](torch.randn(64, 3, 16, 16).flatten(1))
    assert hidden.std().item() == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("name", TEXTS)
def test_batches_of_texts_may_be_padded_less_far(name):
    section = NETWORKS[name]
    model, ids = random_model(section), inputs_of(section, 4)
    assert torch.allclose(model(ids[1:, :7]), model(ids[1:]), atol=1e-12)


def test_a_text_of_padding_alone_has_the_heads_bias():
    model, ids = random_model(NETWORKS["text_mixer"]), inputs_of(NETWORKS["text_mixer"])
    assert torch.equal(model(torch.full((1, 9), PAD))[0], model.head.bias)
    assert torch.allclose(model(torch.cat([ids, torch.full((1, 9), PAD)]))[:3], model(ids), atol=1e-12)


def weights_of_blocks(model) -> int:
    return sum(parameter.numel() for name, parameter in model.named_parameters() if name.startswith(("bl", "enc")))


@pytest.mark.parametrize("budget", [5_000, 123_456])
@pytest.mark.parametrize("name", ["text_mixer", "text_mixer without norms", "text_transformer"])
def test_a_budget_makes_the_blocks_as_wide_as_fits(name, budget):
    """A Mixer's block counts as two layers of equation 3 (Navon & Bronstein 2023), a transformer's as one."""
    section = section_of(OTHERS[name] | {"channels": None, "budget": budget})
    assert weights_of_blocks(build_model(section, 0, 3)) == section.weights(section.width) <= budget
    assert section.weights(section.width + section.width_multiple) > budget
    layers = 1 if name == "text_transformer" else 2
    assert section.depth_to_width() == pytest.approx(layers * 2 / math.log2(section.width))


@pytest.mark.parametrize("name", ["text_mixer", "text_transformer"])
def test_a_budget_may_be_met_exactly(name):
    given = NETWORKS[name]
    for width in (given.width_multiple, 16, 24, 56):
        assert section_of(OTHERS[name] | {"channels": None, "budget": given.weights(width)}).width == width
    with pytest.raises(ValueError, match="the narrowest of depth 2 has"):
        section_of(OTHERS[name] | {"channels": None, "budget": given.weights(given.width_multiple) - 1})


@pytest.mark.parametrize("name", ["text_mixer", "text_transformer"])
def test_prepared_pairs_must_fit_the_tokens_and_the_vocabulary(name):
    section = NETWORKS[name]
    section.check_text(Path("pairs"), 9, 11)
    with pytest.raises(InputError, match=r"^model\.tokens 9: pairs in pairs have up to 10 tokens; .*--length 9"):
        section.check_text(Path("pairs"), 10, 11)
    with pytest.raises(InputError, match=r"^model\.vocabulary 11: the tokenizer\.json .* has 12 words"):
        section.check_text(Path("pairs"), 9, 12)


@pytest.fixture
def published(tmp_path) -> tuple[BottleneckMlp, str]:
    """A network of "Scaling MLPs", and the file in which its authors would have published it."""
    model = random_model(NETWORKS["bottleneck_mlp"]).float()
    theirs = {"stem": "linear_in", "head": "linear_out", "blocks.{}.norm": "layernorms.{}"}
    theirs |= {"blocks.{}.fc1": "blocks.{}.block.0", "blocks.{}.fc2": "blocks.{}.block.2"}
    names = {
        ours.format(block): name.format(block) for ours, name in theirs.items() for block in range(len(model.blocks))
    }
    weights = {
        f"{names[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": value
        for name, value in model.state_dict().items()
    }
    torch.save(weights, tmp_path / "epoch_800")
    return model, str(tmp_path / "epoch_800")


@pytest.mark.parametrize(("classes", "depth"), [(5, 2), (7, 2), (5, 1)])
def test_a_published_mlp_is_loaded_but_for_other_heads(published, classes, depth):
    model, path = published
    network = build_model(NETWORKS["bottleneck_mlp"].model_copy(update={"depth": depth}), 4, classes)
    fresh = network.head.weight.clone()
    if depth == 1:
        with pytest.raises(InputError, match=r"has blocks\.1\.fc1\.bias, which the model does not have"):
            load_init_weights(network, path)
        return
    said = [f"head.{part} newly initialised for 7 classes" for part in ("bias", "weight")]
    assert load_init_weights(network, path) == (said if classes == 7 else [])
    assert torch.equal(network.head.weight, fresh if classes == 7 else model.head.weight)
    images = torch.randn(4, 3, 4, 4)
    assert torch.equal(network.forward_features(images), model.forward_features(images))


def test_published_names_are_read_and_ours_left_alone():
    """The published networks have 12 blocks."""
    assert BottleneckMlp.from_published({"linear_in.weight": 0, "blocks.11.block.2.bias": 1}) == {
        "stem.weight": 0,
        "blocks.11.fc2.bias": 1,
    }
    ours = {"stem.weight": 0, "layernorms.0.weight": 1}
    assert BottleneckMlp.from_published(ours) == ours


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("resmlp_12_224", {"kind": "resmlp", "patch_size": 16, "channels": 384, "depth": 12}),
        ("resmlp_24_224", {"kind": "resmlp", "patch_size": 16, "channels": 384, "depth": 24, "layer_scale": 1e-5}),
        ("gmlp_ti16_224", {"kind": "gmlp", "patch_size": 16, "channels": 128, "depth": 30}),
        ("vit_tiny_patch16_224", {"kind": "timm"}),
        ("resmlp_12_224", {"kind": "timm"}),
    ],
)
def test_of_timms_sizes_they_are_timms(name, keys):
    """With weights of the same random numbers, at first, and with others."""
    section = section_of(keys | ({"name": name} if keys["kind"] == "timm" else {}))
    torch.manual_seed(0)
    model = build_model(section, image_size=32, num_classes=7).eval()
    torch.manual_seed(0)
    theirs = timm.create_model(name, img_size=32, num_classes=7).eval()
    x = torch.randn(2, 3, 32, 32)
    for parameter, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert keys["kind"] == "timm" or torch.equal(parameter, other)
        parameter.data += 0.1 * torch.randn_like(parameter)
        other.data.copy_(parameter.data)
    assert torch.equal(model(x), theirs(x))


VIT = {"patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "act_layer": "relu", "qkv_bias": False}
STAGES = {"layers": [1, 2, 1, 1], "channels": [8, 8, 16, 16]}


@pytest.mark.filterwarnings("ignore:Mapping deprecated model")
@pytest.mark.parametrize(
    ("name", "keys", "made"),
    [
        ("vit_tiny_patch16_224", {"drop_path": 0.5, "arguments": VIT}, VIT | {"img_size": 8, "drop_path_rate": 0.5}),
        ("resnet18", {"arguments": STAGES}, STAGES),
        ("xception", {}, {}),  # timm's earlier name of legacy_xception, of which alone it has a configuration
        ("ghostnet_050", {}, {}),  # which, as 21 of timm's 98 files of networks, knows no stochastic depth
    ],
)
def test_timms_networks_take_its_arguments(name, keys, made):
    section = section_of({"kind": "timm", "name": name, **keys})
    model, theirs = build_model(section, 8, 7), timm.create_model(name, num_classes=7, **made)
    assert str(model) == str(theirs)
    shapes = ({key: value.shape for key, value in each.state_dict().items()} for each in (model, theirs))
    assert next(shapes) == next(shapes)
    if name == "ghostnet_050":
        assert section.timm_spec(32, ()) == ("ghostnet_050", {})
        with pytest.raises(InputError, match=r"ghostnet_050: .* is not made with drop_path_rate 0\.1 "):
            build_model(section_of({"kind": "timm", "name": name, "drop_path": 0.1}), 32, 7)


SW_MLP, VIT_TINY = MASKED["sw_mlp S.17, p 0.2"], {"kind": "timm", "name": "vit_tiny_patch16_224"}


@pytest.mark.parametrize(
    "keys",
    [
        SW_MLP | {"mask_seed": 2**63 - 1, "density": 1, "expansion": 10_000},
        {"kind": "gmlp", **PATCHED, "expansion": 1.26},  # 10 of 8 channels, rounded down as timm does
        {"kind": "shallow", "width": 1618, "matrices": "monarch"},
        {"kind": "shallow", "width": 1619, "matrices": "dense"},
    ],
    ids=lambda keys: keys["kind"],
)
def test_the_ends_of_a_range_are_taken(keys):
    section = section_of(keys)
    section.check_image_size(4)
    assert {key: getattr(section, key) for key in keys} == keys


@pytest.mark.parametrize(
    ("keys", "summary"),
    [
        (SW_MLP | {"expansion": None}, "SW-MLP, P 2, m 32, p 0.2, L 2"),
        (SW_MLP, "SW-MLP, P 2, m 32, p 0.2, L 2, gamma 1.5"),
        *(
            ({"kind": "shallow", "width": 30, "matrices": matrices}, f"{matrices} MLP, m 30")
            for matrices in ("dense", "monarch", "kronecker")
        ),
        ({"kind": "s_local", "base_channels": 7}, "S-LOCAL, alpha 7"),
        ({"kind": "s_fc", "base_channels": 7}, "S-FC, alpha 7"),
        (OTHERS["bottleneck_mlp"], "MLP, m 6, gamma 1.5, L 2"),
        (VIT_TINY | {"name": "resnet18"}, "timm's resnet18"),
        (VIT_TINY | {"arguments": {"layers": [1], "stem": 8}}, "timm's vit_tiny_patch16_224 (layers [1], stem 8)"),
        ({"kind": "permutator", **PATCHED}, "permutator"),
        (OTHERS["text_mixer"], "Mixer, T 9, d 8, L 2"),
        (OTHERS["text_mixer"] | {"activation": "gelu_tanh"}, "Mixer, T 9, d 8, L 2"),
        (OTHERS["text_mixer of random permutations"], "RP Mixer, T 9, d 8, L 2"),
        (OTHERS["text_mixer without norms"], "Mixer, T 9, d 8, L 2, sigma_2"),
        (OTHERS["text_transformer"], "transformer, T 9, d 8, L 2"),
        (NETWORKS["s_mixer"].model_dump(), "S-Mixer, P 2, S 4, C 6, L 3"),
        (
            NETWORKS["unequal hidden widths"].model_dump() | {"permutation": "random", "token_groups": 2},
            "RP Mixer, P 2, S 4, C 6, L 3, D 3/11, 2 token groups",
        ),
        (
            NETWORKS["mixer"].model_dump() | {"channel_weights": "monarch", "activation": "square"},
            "Mixer, P 2, S 4, C 6, L 3, gamma 1.5, monarch channel weights, sigma_2",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_network_is_named_in_the_papers_letters(keys, summary):
    assert KINDS[keys["kind"]](**keys).summary(4) == summary


def test_hidden_widths_are_rounded_and_one_at_least():
    assert [hidden_width(*each) for each in ((1.26, 6), (1.24, 6), (0.01, 8), (2.0, 5))] == [8, 7, 1, 10]
    assert section_of(SW_MLP | {"expansion": 0.985}).hidden_width == 32
