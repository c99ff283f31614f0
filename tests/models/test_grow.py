"""Growing: on every sub-image the grown network computes what the small one did."""

import pytest
import torch
from torch import nn

from tests.models.networks import MLP, SINGLE, VARIANTS
from tests.models.test_mixer import build
from widemix.errors import InputError
from widemix.models.mixer.network import Mixer
from widemix.models.mixer.section import MixerSection

FACTOR = 3


def tile(images):
    """[K^2, 3, h, w], row by row -> one image [1, 3, K*h, K*w]."""
    rows = [torch.cat(list(images[k : k + FACTOR]), dim=2) for k in range(0, FACTOR**2, FACTOR)]
    return torch.cat(rows, dim=1)[None]


CHANNELS = [
    {**MLP, "channel_weights": "monarch"},
    {**SINGLE, "permutation": "random", "channel_weights": "low_rank", "rank": 2},
]


@pytest.mark.parametrize("section", [*VARIANTS.values(), *CHANNELS], ids=[*VARIANTS, "monarch", "low rank"])
def test_copies_compute_on_sub_images_what_the_small_did(section):
    small = build(**section)
    large = small.grown(FACTOR)
    images = torch.randn(FACTOR**2, 3, 4, 4, dtype=torch.float64)
    expected = small.forward_features(images)  # [K^2, S, C]
    features = large.forward_features(tile(images))[0]  # [K^2*S, C]
    if section.get("project_tokens"):
        ours = features.view_as(expected)
    else:  # find the tokens of sub-image (a, b) on the grid, by rows and columns
        grid = features.view(FACTOR, 2, FACTOR, 2, -1)
        ours = torch.stack([grid[a, :, b].flatten(0, 1) for a in range(FACTOR) for b in range(FACTOR)])
    assert torch.allclose(ours, expected, atol=1e-10)
    same = images[:1].expand(FACTOR**2, -1, -1, -1)
    assert torch.allclose(large(tile(same)), small(images[:1]), atol=1e-10)


@pytest.mark.parametrize("kind", [MLP, SINGLE], ids=["mixer", "s_mixer"])
def test_bilinear_answers_constant_features_as_before(kind):
    small = build(**kind)
    large = small.grown(2, "bilinear")
    constant = torch.randn(1, 3, 1, 1, dtype=torch.float64)
    assert large.blocks[0].mlp_tokens.state_dict().keys() == small.blocks[0].mlp_tokens.state_dict().keys()
    hidden = {}
    for model in (small, large):
        side = model.stem.img_size[0]
        x = model.blocks[0].norm1(model.stem(constant.expand(1, 3, side, side)))
        mixing = model.blocks[0].mlp_tokens
        first = mixing.fc1 if kind is MLP else mixing.fc
        hidden[model] = first(x.transpose(1, 2))[0]  # [C, D] or [C, S]
    if kind is MLP:
        assert torch.allclose(hidden[large], hidden[small], atol=1e-10)
        hidden = {model: model.blocks[0].mlp_tokens.fc2(each) for model, each in hidden.items()}
    # What is written lies on the grid: the stretched one's corners are the small one's
    one, other = hidden[small].view(-1, 2, 2), hidden[large].view(-1, 4, 4)
    assert torch.allclose(other[:, ::3, ::3], one, atol=1e-10)
    assert torch.allclose(other[:, 0, 1], 0.75 * one[:, 0, 0] + 0.25 * one[:, 0, 1], atol=1e-10)


def test_what_has_no_grid_is_refused():
    with pytest.raises(InputError, match="take copies"):
        build(**MLP, permutation="random").grown(2, "bilinear")
    with pytest.raises(InputError, match="token_groups"):
        build(**MLP, token_groups=2).grown(2, "bilinear")
    with pytest.raises(InputError, match=r"growing: copies of kronecker token_weights are no such matrix"):
        build(**SINGLE, token_weights="kronecker").grown(2)


def test_growing_leaves_the_small_one_and_its_mode_alone():
    small = build(**MLP).eval()
    before = [tensor.clone() for tensor in small.state_dict().values()]
    large = small.grown(2)
    assert not large.training
    nn.init.zeros_(large.head.weight)
    assert all(torch.equal(a, b) for a, b in zip(before, small.state_dict().values(), strict=True))


@pytest.mark.parametrize("method", ["copies", "bilinear"])
def test_a_grown_network_keeps_what_has_no_size(method):
    keys = {"patch_size": 2, "channels": 6, "depth": 1, "token_hidden": 3, "channel_hidden": 5}
    section = MixerSection(kind="mixer", drop_path=0.25, norm_eps=0.125, **keys)
    small = Mixer(section, img_size=4, in_chans=1, num_classes=7, drop_rate=0.5, global_pool="").half()
    nn.init.normal_(small.head.weight)
    large = small.grown(2, method)
    assert (large.stem.img_size, large.stem.patch_size, large.in_chans) == ((8, 8), (2, 2), 1)
    assert (large.num_classes, large.head_drop.p, large.global_pool) == (7, 0.5, "")
    assert large.section.token_hidden == (12 if method == "copies" else 3)
    assert (large.norm.eps, large.blocks[0].drop_path1.drop_prob) == (0.125, 0.25)
    assert {parameter.dtype for parameter in large.parameters()} == {torch.float16}
    assert torch.equal(large.head.weight, small.head.weight)
    assert large.training
