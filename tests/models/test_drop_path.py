"""Stochastic depth whose choices belong to the samples."""

import itertools

import numpy as np
import pytest
import timm
import torch

from tests.conftest import ROOT
from widemix.data.random import scramble as scramble_of_one
from widemix.models.drop_path import (
    DropPath,
    drop_path,
    keeps,
    number_drop_paths,
    raise_linearly,
    scramble,
    set_drop_path_keys,
)
from widemix.models.families import named_networks
from widemix.models.registry import build_model
from widemix.recipe import load_recipe

KEYS = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 4000))


def test_the_hash_is_that_of_the_data():
    words = KEYS[:50].numpy().view(np.uint64)
    expected = np.array([scramble_of_one(word) for word in words], np.uint64)
    assert np.array_equal(scramble(KEYS[:50]).numpy().view(np.uint64), expected)


@pytest.mark.parametrize("keys", [KEYS, None], ids=["by keys", "by torch's generator"])
def test_so_many_are_dropped_and_the_rest_is_scaled(keys):
    torch.manual_seed(0)
    layer, ones = DropPath(0.3, number=2).train(), torch.ones(len(KEYS), 2, 3)
    set_drop_path_keys([layer], KEYS)
    set_drop_path_keys([layer], keys)
    out = layer(ones)
    assert abs((out[:, 0, 0] == 0).float().mean().item() - 0.3) < 0.03
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / (1 - 0.3)).item()}
    assert torch.equal(layer(ones), out) is (keys is KEYS)  # calls are not counted
    assert torch.equal(layer.eval()(out), out)
    assert DropPath(0.0).train()(ones) is ones
    assert isinstance(drop_path(0.0), torch.nn.Identity)
    assert drop_path(0.1).drop_prob == 0.1


def test_the_choice_is_the_hash_of_key_and_number():
    """Whatever is resumed by a later version drops the same."""
    for number, probability in ((0, 0.5), (37, 0.1)):
        words = (KEYS[:200] ^ number).numpy().view(np.uint64)
        fractions = [int(scramble_of_one(word)) / 2**64 for word in words]
        assert keeps(KEYS[:200], number, probability).tolist() == [each >= probability for each in fractions]
    layer = DropPath(0.5, number=3).train()
    layer.counts_calls = True
    set_drop_path_keys([layer], KEYS)
    for call in range(2):
        assert torch.equal(layer(torch.ones(len(KEYS))) > 0, keeps(KEYS, 3 * 16 + call, 0.5))


def test_choices_belong_to_samples_layers_and_calls():
    places, layers = torch.randperm(len(KEYS)), [DropPath(0.5, number).train() for number in range(3)]
    assert torch.equal(keeps(KEYS[places], 1, 0.5), keeps(KEYS, 1, 0.5)[places])
    for layer in layers:
        layer.counts_calls = True
    set_drop_path_keys(layers, KEYS)
    kept = [layer(torch.ones(len(KEYS))) > 0 for layer in layers for _ in range(3)]
    for one, other in itertools.combinations(kept, 2):
        assert abs((one == other).float().mean().item() - 0.5) < 0.05


@pytest.mark.parametrize("name", ["imagenet/mixer_b16", "mnli/mixer"])
def test_the_probability_can_rise_over_the_blocks(name):
    overrides = [("model.drop_path", "0.3"), ("model.drop_path_rises", "true"), ("model.depth", "4")]
    recipe = load_recipe(ROOT / f"recipes/{name}.yaml", overrides)
    with torch.device("meta"):
        network = build_model(recipe.model, 224, 10)
    found = [part.drop_prob for part in network.modules() if isinstance(part, DropPath)]
    assert found == pytest.approx([0.0, 0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3])
    one = torch.nn.Sequential(DropPath(0.3))
    raise_linearly(list(one))  # of one block, which is the first
    assert one[0].drop_prob == 0


KINDS_THAT_DROP = {
    section.kind: (section, side)
    for section, side in named_networks().values()
    if "drop_path" in section.model_dump()
}


@pytest.mark.parametrize("kind", [*KINDS_THAT_DROP, "text"])
def test_each_branch_has_a_layer_of_its_own(kind):
    if kind == "text":
        section, side = load_recipe(ROOT / "recipes/mnli/mixer.yaml").model, 224
        shape, dtype = (4, section.tokens), torch.int64
    else:
        section, side = KINDS_THAT_DROP[kind]
        shape, dtype = (4, 3, side, side), torch.float32
    section = section.model_copy(update={"drop_path": 0.5, "drop_path_rises": False, "depth": 3})
    called: list[DropPath] = []
    with torch.device("meta"):
        network = build_model(section, side, 3).train()
        for layer in (part for part in network.modules() if isinstance(part, DropPath)):
            layer.register_forward_hook(lambda module, _, __: called.append(module))
        network(torch.ones(shape, dtype=dtype))
    layers = [part for part in network.modules() if isinstance(part, DropPath)]
    assert [layers.index(layer) for layer in called] == list(range(len(layers)))
    assert len(layers) in (3, 6)  # a mixing or two in each block


def test_timms_layers_are_replaced_in_any_network():
    model = timm.create_model("resmlp_12_224", img_size=32, drop_path_rate=0.5, num_classes=3).train()
    layers = number_drop_paths(model)
    assert [layer.number for layer in layers] == list(range(len(layers)))
    assert not any(type(part) is timm.layers.DropPath for part in model.modules())
    assert all(layer.training for layer in layers)
    still = timm.create_model("resmlp_12_224", img_size=32, drop_path_rate=0.5, num_classes=3).eval()
    rates = [part.drop_prob for part in still.modules() if type(part) is timm.layers.DropPath]
    replaced = number_drop_paths(still)
    assert [layer.drop_prob for layer in replaced] == rates
    assert not any(layer.training for layer in replaced)
    set_drop_path_keys(layers, KEYS)
    dropped = [layer(torch.ones(len(KEYS))) == 0 for layer in layers if layer.drop_prob > 0.4]
    assert not torch.equal(dropped[0], dropped[-1])
    images, keys = torch.randn(8, 3, 32, 32), KEYS[:8]
    set_drop_path_keys(layers, keys)
    whole = model(images)
    set_drop_path_keys(layers, keys[4:])
    torch.testing.assert_close(model(images[4:]), whole[4:])


def test_each_call_in_a_block_samples_for_itself():
    model = timm.create_model("mixer_s32_224", img_size=32, drop_path_rate=0.5, num_classes=3).train()
    layers = [layer for layer in number_drop_paths(model) if layer.drop_prob]
    set_drop_path_keys(layers, KEYS[:16])
    layer, ones = layers[-1], torch.ones(16, 1)
    block = next(part for part in model.modules() if layer in part.children())
    first, second = layer(ones), layer(ones)
    assert not torch.equal(first, second)
    layer.start_block(block)
    assert torch.equal(layer(ones), first)

    images = torch.randn(16, 3, 32, 32)
    gradients = []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        model(images).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])
