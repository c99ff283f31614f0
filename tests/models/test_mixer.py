"""Mixers against dense effective matrices, and against timm."""

import math

import pytest
import torch

from tests.models.networks import MLP, RP, SHAPE, SINGLE
from widemix.models.cost import model_cost
from widemix.models.mixer.section import MixerSection
from widemix.models.permutation import commutation
from widemix.models.registry import build_model
from widemix.recipe import load_recipe


def build(seed=0, **section):
    """A small Mixer in double precision with no weight left at zero or one."""
    torch.manual_seed(seed)
    model = build_model(MixerSection(**{**SHAPE, **section}), image_size=4, num_classes=5).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("kind", [MLP, SINGLE], ids=["mixer", "s_mixer"])
def test_rp_with_commutation_permutations_is_the_normal_mixer_exactly(kind):
    normal, permuted = build(**kind), build(**kind, **RP)
    missing, unexpected = permuted.load_state_dict(normal.state_dict(), strict=False)
    assert not unexpected
    assert all(name.endswith("index") for name in missing)
    for block in permuted.blocks:
        block.mlp_tokens.permute_in.index.copy_(commutation(4, 6))
        block.mlp_tokens.permute_out.index.copy_(commutation(6, 4))
        for module in (block.mlp_channels.permute_in, block.mlp_channels.permute_out):
            module.index.copy_(torch.arange(24))
    x = torch.randn(7, 3, 4, 4, dtype=torch.float64)
    ours, theirs = permuted(x), normal(x)
    assert torch.equal(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    for name, parameter in normal.named_parameters():  # summed over the batch in another order
        assert torch.allclose(parameter.grad, permuted.get_parameter(name).grad, rtol=1e-12, atol=1e-12), name
    assert torch.equal(permuted.float()(x.float()), normal.float()(x.float()))


def test_depth_counts_layers_of_equation_3():
    """Navon & Bronstein 2023, definition 3.2: odd layers mix tokens, even ones channels; p counts both."""
    section = MixerSection(**{**SHAPE, **SINGLE, "channels": 8})
    assert section.depth_to_width() == 2 * SHAPE["depth"] / 3


def indices(model) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("index")}


def test_random_permutations_are_independent_and_travel_with_the_weights():
    model, other, skips = (
        build(**MLP, **RP | {"permutation_seed": seed}, permuted_skips=skips)
        for seed, skips in ((5, False), (0, False), (5, True))
    )
    each = build(kind="mixer", token_hidden=4, channel_hidden=6, permuted_layers="each", **RP)  # all of 24 entries
    for network, number in ((model, 3 * 4), (each, 3 * 6), (skips, 3 * 6)):
        assert len({tuple(index.tolist()) for index in indices(network).values()}) == len(indices(network)) == number
    of_another_seed = indices(build(**MLP, permutation="random", permutation_seed=0, permuted_skips=True))
    for name, index in indices(skips).items():
        assert not torch.equal(index, of_another_seed[name]), name
        assert name not in indices(model) or torch.equal(index, model.get_buffer(name)), name
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    assert not torch.allclose(model(x), other(x))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(x), other(x))


SKIPS = {"permuted_skips": True}


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (SKIPS | {"permuted_mixings": "token", "permuted_blocks": [0, 2]}, ["0.skip", "2.skip"]),
        (SKIPS | {"permuted_mixings": "channel", "permuted_blocks": [1]}, ["1.channel_skip"]),
        (SKIPS | {"permuted_blocks": []}, []),
        ({"permuted_blocks": []}, []),
        ({"permuted_blocks": [1]}, []),
        (SKIPS | {"project_tokens": 7},
         ["0.channel_skip", "1.skip", "1.channel_skip", "2.skip", "2.channel_skip"]),
    ],
)  # fmt: skip
def test_permutations_are_where_the_keys_say(keys, names):
    """With the numbers that replacing all would have there."""
    found = indices(build(**MLP, **RP, **keys))
    assert {name for name in found if "skip" in name} == {f"blocks.{name}.index" for name in names}
    blocks = keys.get("permuted_blocks", range(3))
    assert {int(name.split(".")[1]) for name in found} == {*blocks}
    if "project_tokens" not in keys:
        everywhere = build(**MLP, **RP, permuted_skips=True)
        assert all(torch.equal(index, everywhere.get_buffer(name)) for name, index in found.items())


def test_the_head_starts_with_timms_bias_on_request():
    model = build(**MLP)
    for nlhb, bias in ((True, -math.log(5)), (False, 0.0)):
        model.init_weights(nlhb=nlhb)
        assert model.head.bias.tolist() == pytest.approx([bias] * 5)
        assert not model.head.weight.any()
        assert not model.blocks[0].mlp_tokens.fc1.bias.any()


def test_timm_has_a_twin_of_plain_mixers_alone():
    keys = {"patch_size": 4, "channels": 11, "depth": 2, "token_hidden": 15, "channel_hidden": 30}
    plain = MixerSection(kind="mixer", **keys)
    twin = plain.timm_twin(8, 5)
    assert twin is not None
    shapes = {name: tensor.shape for name, tensor in twin().state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in build_model(plain, 8, 5).state_dict().items()}
    for change in (
        {"project_tokens": 4},
        {"project_tokens": 5},
        {"norm_eps": 1e-5},
        {"activation": "square"},
        {"activation": "gelu_tanh"},
        {"norm": "none"},
        {"kind": "s_mixer", "token_hidden": None, "channel_hidden": None},
    ):
        assert MixerSection(**{"kind": "mixer", **keys, **change}).timm_twin(8, 5) is None, change


def test_what_the_paper_prints_otherwise_is_said():
    named = MixerSection.named()
    said = {name: network.published_note(side) for name, (network, side) in named.items()}
    starts = {
        "mixer_b_w_224": "table 1: Omega 2.6e8",
        "mixer_b_w_table1_224": "the text: gamma 4.57",
        "mixer_b16_224": "table 1: 786 channels",
        "mixer_ss_w_32": "table 1: 255 M",
        "mixer_ss_w_table1_32": "the text: C = 487",
    }
    starts |= {f"rp_{name}": start for name, start in starts.items()}
    assert {name for name, note in said.items() if note} == set(starts)
    for name, start in starts.items():
        assert str(said[name]).startswith(start)


@pytest.mark.parametrize(
    ("name", "figure", "printed"),
    [
        ("mixer_b_w_224", "omega", 2.90e8),
        ("mixer_b_w_224", "hidden_width", 6.88e5),
        ("mixer_b_w_table1_224", "omega", 2.6e8),
        ("mixer_b_w_table1_224", "hidden_width", 6.2e5),
        ("mixer_ss_w_32", "connections", 275e6),
        ("mixer_ss_w_table1_32", "connections", 255e6),
        ("mixer_h14_224", "parameters", 431e6),
    ],
)
def test_published_sizes_give_what_the_paper_prints(name, figure, printed):
    """Hayase & Karakida 2024, tables 1 and S.3, and of H/14 Tolstikhin et al. 2021, all rounded."""
    cost = model_cost(*MixerSection.named()[name], 10)
    assert getattr(cost, figure) == pytest.approx(printed, rel=0.01)


def test_the_small_published_mixer_is_the_recipes():
    """But for timm's epsilon."""
    named, side = MixerSection.named()["mixer_ss8_32"]
    recipe = load_recipe("cifar10/mixer_ss8")
    assert (named.model_dump(exclude={"norm_eps"}), side) == (recipe.model.model_dump(exclude={"norm_eps"}), 32)
