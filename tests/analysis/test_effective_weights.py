"""Effective weights and receptive fields against dense matrices and their boolean products."""

import json
from functools import reduce

import numpy as np
import pytest
import torch

from widemix.analysis.effective_weights import (
    TooLargeError,
    block_weights,
    effective_weights,
    input_features,
    receptive_fields,
    shrink,
)
from widemix.errors import InputError
from widemix.models.families import KINDS
from widemix.models.registry import build_model


def build(kind: str, **keys):
    return build_model(KINDS[kind](kind=kind, **keys), 8, 10).eval()


MIXER = {"patch_size": 2, "channels": 8, "depth": 3}


RANDOM = {"permutation": "random"}


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("s_mixer", {}),
        ("s_mixer", RANDOM),
        ("s_mixer", {"token_groups": 4}),
        ("mixer", {"expansion": 2}),
        ("mixer", {"expansion": 2, **RANDOM}),
        ("mixer", {"expansion": 2, **RANDOM, "permuted_layers": "each"}),
    ],
)
def test_effective_weights_are_the_jacobian_of_their_mixing(kind, keys):
    """Of one layer J2 (I (x) W) J1, of two the product of both: what a mixing is without its activation."""
    block, x = build(kind, **MIXER, **keys).blocks[0], torch.randn(128)
    found = effective_weights(block, (16, 8))
    for name in ("mlp_tokens", "mlp_channels"):
        mixing, layers = getattr(block, name), [found[layer] for layer in found if layer.startswith(name)]
        mixing.act = torch.nn.Identity()
        expected = torch.autograd.functional.jacobian(lambda x, of=mixing: of(x.view(1, 16, 8)).flatten(), x)
        np.testing.assert_allclose(reduce(lambda one, other: other @ one, layers), expected.numpy(), atol=1e-5)
        assert len(layers) == (1 if kind == "s_mixer" else 2)


def test_effective_weights_of_a_mask_are_its_matrix():
    block = build("sw_mlp", patch_size=4, width=32, depth=1, density=0.2, expansion=2).blocks[0]
    found = effective_weights(block, (32,))
    assert found["fc1"].shape == (64, 32)
    np.testing.assert_array_equal(found["fc2"], block.fc2.dense_weight().detach().numpy())


@pytest.mark.one_in(5)
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("s_mixer", MIXER),
        ("s_mixer", {"permutation": "random", **MIXER}),
        ("mixer", {"permutation": "random", "permuted_layers": "each", "expansion": 1, **MIXER}),
        ("mixer", {"token_groups": 4, "expansion": 2, **MIXER}),
        ("s_mixer", {"permutation": "random", "project_tokens": 6, **MIXER}),
        ("sw_mlp", {"patch_size": 4, "width": 92, "depth": 3, "density": 0.05}),
    ],
)
def test_receptive_fields_are_those_of_a_dense_boolean_product(kind, keys, skips):
    model = build(kind, **keys)
    features = inputs = input_features(model, 8)
    reach = np.eye(int(np.prod(features)), dtype=bool)
    expected, tokens = [], []
    for block in model.blocks:
        layers = effective_weights(block, features)
        mixings = [("fc",)] if kind == "sw_mlp" else [("mlp_tokens",), ("mlp_channels",)]
        for (name,) in mixings:
            connected = np.eye(len(reach), dtype=bool)
            for layer in [layer for layer in layers if layer.startswith(name)]:
                connected = (layers[layer] != 0).astype(int) @ connected > 0
            new = connected.astype(int) @ reach > 0
            if skips and name == "mlp_tokens" and keys.get("project_tokens") and block is model.blocks[0]:
                new |= np.kron(np.ones((6, 16)), np.eye(8)).astype(int) @ reach > 0
            elif skips:
                new |= reach
            reach = new
            expected.append(reach.mean(1))
            by_token = reach.reshape(-1, *inputs).any(2).mean() if len(inputs) == 2 else None
            tokens.append(by_token if by_token is None else pytest.approx(by_token))
        features = (6, 8) if keys.get("project_tokens") else features
    found = receptive_fields(model, inputs, units=10_000, skips=skips)
    assert [each["mean"] for each in found] == pytest.approx([each.mean() for each in expected])
    assert [each["least"] for each in found] == pytest.approx([each.min() for each in expected])
    assert [each["most"] for each in found] == pytest.approx([each.max() for each in expected])
    assert [each["tokens"] for each in found] == tokens


def test_a_later_blocks_weights_are_of_its_features():
    """Of a network whose first block projects 16 tokens to 6."""
    model = build("s_mixer", project_tokens=6, **MIXER)
    shapes = [{name: m.shape for name, m in block_weights(model, (16, 8), number).items()} for number in (0, 2)]
    assert shapes == [{"mlp_tokens": (48, 128), "mlp_channels": (48, 48)}, dict.fromkeys(shapes[0], (48, 48))]


def test_an_rp_mixer_begins_with_its_widths_inverse_root():
    """Appendix D.4, for S = C; sampled units of a larger one, of which no matrix is made."""
    model = build("s_mixer", **{**MIXER, "channels": 16}, permutation="random")
    first, second = receptive_fields(model, input_features(model, 8), units=20)[:2]
    assert first["mean"] == first["most"] == 256**-0.5
    assert 0.5 < second["mean"] < 0.75  # 1 - 1/e


def test_a_matrix_at_the_limit_is_made():
    model = build("s_mixer", **MIXER)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert effective_weights(model.blocks[0], (16, 8), 128)["mlp_tokens"].shape == (128, 128)
    with pytest.raises(TooLargeError, match="effective weights of 128 columns: at most 127 are made"):
        effective_weights(model.blocks[0], (16, 8), 127)
    masked = build("sw_mlp", patch_size=4, width=92, depth=1, density=0.05)
    fields = [receptive_fields(masked, (92,), 3, seed=seed) for seed in (0, 0, 1)]
    assert fields[0] == fields[1] != fields[2]
    receptive_fields(model, input_features(model, 8), 3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    with pytest.raises(AssertionError, match="height"):
        input_features(model, 9)
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_networks_without_effective_weights_and_shrinking():
    with pytest.raises(InputError, match="Mixers and SW-MLPs"):
        input_features(torch.nn.Linear(2, 2), 8)
    sparse = np.zeros((1000, 700), bool)
    sparse[999, 1] = True
    shown = shrink(sparse)
    assert shown.shape == (500, 350)
    assert shown.sum() == shown[499, 0] == 1


def test_the_command(tmp_path, widemix):
    recipes = ["recipes/digits/s_mixer.yaml", "recipes/digits/rp_s_mixer.yaml"]
    options = ["--to", tmp_path, "--json", tmp_path / "weights.json", "--block", "1", "--units", "4"]
    code, printed = widemix("analyse", "weights", *recipes, *options)
    assert code == 0, printed
    content = json.loads((tmp_path / "weights.json").read_text())
    assert content[1]["fields"][0]["mean"] == pytest.approx(1 / content[1]["layers"]["mlp_tokens"][1] * 16)
    assert [(each["network"], each["features"], each["block"]) for each in content] == [(r, 1024, 1) for r in recipes]
    assert content[0]["layers"] == {"mlp_tokens": [1024, 1024, 1 / 64], "mlp_channels": [1024, 1024, 1 / 16]}
    assert [content[0][kind][0]["mean"] for kind in ("fields", "fields_with_skips")] == [16 / 1024] * 2  # of its row
    assert content[1]["fields_with_skips"][0]["mean"] > content[1]["fields"][0]["mean"]
    fractions = ", ".join(f"{each['mean']:.3f}" for each in content[1]["fields"][:4])
    assert f"{recipes[1]}: m 1024; of the features reach a unit after 1, 2, ... mixings: {fractions}\n" in printed
    assert {path.name for path in tmp_path.glob("*.png")} == {"weights.png", "receptive_fields.png"}
    large = tmp_path / "large"
    options = ["--to", large, "--units", "2", "--json", tmp_path / "large.json"]
    code, said = widemix("analyse", "weights", "cifar10/figure7", *options)
    assert (code, "effective weights of 16,384 columns: at most 8,192 are made" in said) == (0, True)
    assert [path.name for path in large.iterdir()] == ["receptive_fields.png"]
    (content,) = json.loads((tmp_path / "large.json").read_text())
    assert (content["features"], content["layers"]) == (128 * 64, {})
