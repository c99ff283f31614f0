"""Sheets of filters: frequencies against plain sums, pairs against planted ones, weights against the layers."""

import json

import numpy as np
import pytest
import timm
import torch

from widemix.analysis.filters import (
    Filters,
    layer_filters,
    mean_frequency,
    patch_filters,
    plot_filters,
    sort_filters,
    token_filters,
)
from widemix.errors import InputError
from widemix.evaluation.networks import load_network
from widemix.models.mixer.section import MixerSection
from widemix.models.registry import build_model

SHAPE = {"patch_size": 4, "channels": 6, "depth": 2, "token_hidden": 7, "channel_hidden": 8}


def mixer(**keys):
    return build_model(MixerSection(kind="mixer", **SHAPE | keys), 12, 2)


def test_the_frequency_is_that_of_a_plain_sum():
    filters = np.random.RandomState(0).randn(3, 4, 5, 3)
    for found, values in zip(mean_frequency(filters), filters, strict=True):
        weighted = total = 0.0
        for u in range(4):
            for v in range(5):
                wave = [[np.exp(-2j * np.pi * (u * y / 4 + v * x / 5)) for x in range(5)] for y in range(4)]
                power = sum(abs((values[..., color] * wave).sum()) ** 2 for color in range(3))
                weighted += power * np.hypot(min(u, 4 - u) / 4, min(v, 5 - v) / 5)
                total += power
        assert found == pytest.approx(weighted / total)
    chess = (-1.0) ** np.add.outer(np.arange(4), np.arange(4))
    assert mean_frequency(np.stack([chess, np.ones((4, 4)), np.zeros((4, 4))])) == pytest.approx([0.5**0.5, 0, 0])


def test_pairs_are_the_most_opposite_and_one_is_left():
    filters = np.random.RandomState(2).randn(7, 3, 3)
    flat = filters.reshape(7, 9) / np.linalg.norm(filters.reshape(7, 9), axis=1)[:, None]
    left, pairs = set(range(7)), {}
    while len(left) > 1:  # a plain loop
        a, b = min(((a, b) for a in left for b in left if a < b), key=lambda pair: flat[pair[0]] @ flat[pair[1]])
        pairs[a, b] = flat[a] @ flat[b]
        left -= {a, b}
    order, frequency, opposition = sort_filters(filters)
    assert order[-1] == left.pop()
    firsts, means = frequency[order[:6:2]], frequency[order[:6]].reshape(3, 2).mean(1)
    assert means.tolist() == sorted(means)
    assert firsts.tolist() != sorted(firsts)
    found = {tuple(sorted(order[i : i + 2].tolist())): opposition[i // 2] for i in (0, 2, 4)}
    assert found == pytest.approx(pairs)


@pytest.mark.parametrize("kind", ["timms", "ours", "structured"])
def test_filters_give_what_the_layers_give(kind):
    """Patch filter and unit as plain sums over the image and over the grid."""
    torch.manual_seed(0)
    if kind == "timms":
        model = timm.models.MlpMixer(img_size=12, patch_size=4, num_classes=2, embed_dim=6, num_blocks=2)
    else:
        structure = {"token_weights": "low_rank", "rank": 2} if kind == "structured" else {}
        model = mixer(**structure)
    name, patch = patch_filters(model)
    image = torch.randn(1, 3, 12, 12)
    tokens = model.stem(image) - model.stem.proj.bias
    window = image[0, :, 4:8, 8:12].permute(1, 2, 0).numpy()  # the patch in row 1, column 2
    assert name == "stem.proj"
    assert tokens[0, 5].detach().numpy() == pytest.approx([(window * each).sum() for each in patch], abs=1e-5)
    name, units = token_filters(model, 1)
    grid = torch.randn(3, 3)
    layer = model.blocks[1].mlp_tokens.fc1
    expected = (layer(grid.reshape(9)) - layer.bias).detach().numpy()
    assert name == "blocks.1.mlp_tokens.fc1"
    assert expected == pytest.approx([(grid.numpy() * unit).sum() for unit in units], abs=1e-5)


def test_tokens_without_a_grid_are_refused():
    projected, permuted = mixer(project_tokens=5), mixer(permutation="random")
    assert token_filters(projected, 0)[1].shape == (7, 3, 3)
    for model, block, error_message in (
        (projected, 1, "are projected"),
        (permuted, 0, "randomly permuted"),
        (timm.create_model("resnet10t", num_classes=2), 0, "has 0 blocks"),
    ):
        with pytest.raises(InputError, match=error_message):
            token_filters(model, block)
    assert [each.layer for each in layer_filters(permuted)] == ["stem.proj"]
    assert [each.layer for each in layer_filters(mixer(), [])] == ["stem.proj"]
    assert [each.layer for each in layer_filters(mixer(), [1])] == ["stem.proj", "blocks.1.mlp_tokens.fc1"]


def test_patch_filters_are_the_first_convolution_of_images():
    layers = [torch.nn.Conv2d(3, 3, 3, groups=3), torch.nn.Conv2d(6, 4, 1), torch.nn.Conv2d(3, 5, 2)]
    name, found = patch_filters(torch.nn.Sequential(*layers))
    assert (name, found.shape) == ("2", (5, 2, 2, 3))
    with pytest.raises(InputError, match="the network has no convolution of images"):
        patch_filters(torch.nn.Sequential(*layers[:2]))


@pytest.mark.parametrize("name", ["mlp_tokens.fc1", "linear_tokens"])
@pytest.mark.parametrize("tokens", [9, 12, 15])
def test_each_name_of_timms_token_mixings_is_known(name, tokens):
    model, block = torch.nn.Module(), torch.nn.Module()
    outer, _, inner = name.partition(".")
    layer = torch.nn.Linear(tokens, 4)
    block.add_module(outer, torch.nn.ModuleDict({inner: layer}) if inner else layer)
    model.blocks = torch.nn.ModuleList([block])
    if tokens == 9:
        found, values = token_filters(model, 0)
        assert (found, values.shape) == (f"blocks.0.{name}", (4, 3, 3))
        assert values.reshape(4, 9) == pytest.approx(layer.weight.detach().numpy())
        return
    with pytest.raises(InputError, match=f"--blocks 0: {tokens} tokens are no square grid"):
        token_filters(model, 0)


@pytest.mark.parametrize("full", [0, 1])
def test_pairs_with_a_filter_of_zeros_have_no_cosine(full):
    filters = np.zeros((2, 2, 2))
    filters[full] = 1
    assert np.isnan(sort_filters(filters)[2]).tolist() == [True]


def test_titles_have_the_median_of_the_cosines_that_there_are():
    found = Filters("a", np.ones((6, 2, 2)), np.arange(6), np.zeros(6), np.array([-1.0, np.nan, -0.5]))
    assert found.median_opposition == -0.75
    pair = Filters("a", np.stack([np.eye(2), -np.eye(2)]), np.arange(2), np.zeros(2), np.array([-1.0]))
    assert plot_filters("x", pair).axes[0].get_title(loc="left").endswith("median cosine of pairs -1.00")
    zeros = Filters("zeros", np.zeros((4, 2, 2)), *sort_filters(np.zeros((4, 2, 2))))
    assert np.isnan(zeros.median_opposition)
    assert zeros.as_json()["opposition"] == [None, None]


def test_the_command(tmp_path, widemix):
    code, said = widemix("analyse", "filters", "digits/mixer", "--to", tmp_path, "--json", tmp_path / "filters.json")
    assert (code, "blocks.0.mlp_tokens.fc1: 32 filters of 4 x 4, frequencies" in said) == (0, True)
    names = ["stem.proj", "blocks.0.mlp_tokens.fc1", "blocks.1.mlp_tokens.fc1", "blocks.2.mlp_tokens.fc1"]
    assert {path.stem for path in tmp_path.glob("*.png")} == set(names)
    found = json.loads((tmp_path / "filters.json").read_text())
    assert [layer["layer"] for layer in found["layers"]] == names
    assert sorted(found["layers"][1]["order"]) == list(range(32))
    assert [layer["shape"] for layer in found["layers"]] == [[64, 2, 2, 3], *[[32, 4, 4]] * 3]
    values = load_network("recipes/digits/mixer.yaml").module.blocks[2].mlp_tokens.fc1.weight.detach()
    order, frequency, opposition = sort_filters(values.reshape(32, 4, 4).numpy())
    assert found["layers"][3] == {"layer": names[3], "shape": [32, 4, 4], "order": order.tolist()} | {
        "frequency": pytest.approx(frequency.tolist()),
        "opposition": pytest.approx(opposition.tolist()),
    }
