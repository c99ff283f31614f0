"""What timm promises of a model holds for ours."""

import copy

import pytest
import timm
import torch
from timm.models._manipulate import group_parameters
from torch import nn

import widemix  # noqa: F401  puts our names into timm's registry
from widemix.errors import InputError

SCRIPTS = "ignore:.*deprecated:FutureWarning"  # newer torch's, of torch.jit.script
SMALL = {"depth": 2, "channels": 12, "token_hidden": 8, "channel_hidden": 20}
PATCHED = {"patch_size": 8, "channels": 16, "depth": 2}
MIXERS = {
    "mixer_ss8_32": SMALL,
    "rp_mixer_ss8_32": SMALL,
    "rp_s_mixer_ss8_32": {"depth": 2, "channels": 12},
    "mixer_ss_w_32": {**SMALL, "project_tokens": 5},  # projected from 64 tokens
}
TOKENS = MIXERS | {
    "ff_only_b16_224": PATCHED,
    "permutator_s14_224": PATCHED,
    "repmlp_s16_224": {**PATCHED, "share_sets": 4},
}
IMAGES = TOKENS | {
    "sw_mlp_1619_32": {"width": 30, "depth": 2},
    "shallow_monarch_4096_32": {"width": 30},
    "shallow_kronecker_4096_32": {"width": 30},
    "shallow_dense_4096_32": {"width": 30, "grayscale": True},
    "s_fc_32": {"base_channels": 2},
    "s_local_32": {"base_channels": 2},
    "mlp_b6_wi512_64": {"width": 30, "depth": 2, "expansion": 0.4},
}
EVERY = IMAGES | {"text_mixer": {}, "text_transformer": {}}
X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(1, 100, (2, 8), generator=torch.Generator().manual_seed(1))


def create(name, **kwargs):
    size = {} if name.startswith("text") else {"img_size": 32}
    torch.manual_seed(0)
    model = timm.create_model(name, **{"num_classes": 7, **size, **EVERY[name], **kwargs}).eval()
    if isinstance(getattr(model, "head", None), nn.Linear):
        nn.init.normal_(model.head.weight)
    return model


@pytest.mark.parametrize("name", EVERY)
def test_heads_and_features_compose_and_heads_are_replaced(name):
    model, x = create(name), IDS if name.startswith("text") else X
    features = model.forward_features(x)
    pooled = model.forward_head(features, pre_logits=True)
    assert pooled.shape == (2, model.num_features)
    assert torch.equal(model.forward_head(features), model(x))
    assert torch.equal(model.head(pooled), model(x))
    assert model.get_classifier() is model.head
    assert model.pretrained_cfg["classifier"] == "head"
    weights = model.state_dict()
    model.reset_classifier(0)
    assert (model.num_classes, torch.equal(model(x), pooled)) == (0, True)
    model.double().reset_classifier(4)
    assert (model.num_classes, model.get_classifier().out_features, model.head.training) == (4, 4, False)
    assert model(x if x is IDS else x.double()).shape == (2, 4)
    assert model.train().train()(x if x is IDS else x.double()).shape == (2, 4)
    headless = create(name, num_classes=0)
    headless.load_state_dict({key: value for key, value in weights.items() if "head" not in key})
    assert torch.equal(headless(x), pooled)


@pytest.mark.parametrize("name", TOKENS)
def test_dropout_and_pooling_are_those_asked_for(name):
    model = create(name, in_chans=1, drop_rate=0.25, global_pool="")
    assert (model.head_drop.p, model.in_chans) == (0.25, 1)
    features = model.forward_features(X[:, :1])
    tokens = {"mixer_ss_w_32": 5, "ff_only_b16_224": 17}.get(name, 16)
    assert features.shape == (2, tokens, model.num_features)
    assert model(X[:, :1]).shape == (2, tokens, 7)
    assert torch.equal(model.forward_head(features, pre_logits=True), features)
    model.reset_classifier(0, "")
    assert torch.equal(model(X[:, :1]), features)
    model.reset_classifier(4, "avg")
    assert model(X[:, :1]).shape == (2, 4)


@pytest.mark.parametrize("name", IMAGES)
def test_images_may_have_other_channels_and_sizes(name):
    model = create(name, in_chans=4)
    assert model.in_chans == 4
    assert model(torch.randn(2, 4, 32, 32)).shape == (2, 7)
    assert torch.equal(create(name, img_size=(32, 32))(X), create(name)(X))
    large = create(name, img_size=64)
    assert large(torch.randn(2, 3, 64, 64)).shape == (2, 7)
    if name in MIXERS:
        with pytest.raises(AssertionError, match="doesn't match model"):
            large(X)


@pytest.mark.parametrize("name", ["ff_only_b16_224", "repmlp_s16_224"])
def test_an_image_need_not_be_square(name):
    model = create(name, img_size=(16, 32))
    assert model.stem.grid_size == (2, 4)
    assert model(torch.randn(2, 3, 16, 32)).shape == (2, 7)


@pytest.mark.parametrize("name", IMAGES)
def test_copies_are_separate_and_checkpointing_changes_nothing_but_memory(name):
    model = create(name)
    twin, before = copy.deepcopy(model), model(X)
    plain = torch.autograd.grad(before.square().sum(), list(model.parameters()))
    twin.set_grad_checkpointing()
    saving = torch.autograd.grad(twin(X).square().sum(), list(twin.parameters()))
    for one, other in zip(plain, saving, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for tensor in [*twin.parameters(), *twin.buffers()]:
            tensor.zero_()
    assert torch.equal(model.train().train().eval()(X), before)


@pytest.mark.filterwarnings(SCRIPTS)
@pytest.mark.parametrize("name", IMAGES)
def test_scripts_and_exports(name):
    model = create(name)
    torch.testing.assert_close(torch.jit.script(model)(X), model(X), rtol=1e-5, atol=1e-5)
    if name in MIXERS:
        torch.testing.assert_close(torch.export.export(model, (X,)).module()(X), model(X), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in TOKENS if name not in ("mixer_ss_w_32", "ff_only_b16_224")])
def test_features_only_gives_maps_of_the_blocks(name):
    network, features, seen = create(name), create(name, features_only=True), []
    features.model.load_state_dict(network.state_dict(), strict=False)
    for block in network.blocks:
        block.register_forward_hook(lambda *call: seen.append(call[2].transpose(1, 2).unflatten(2, (4, 4))))
    network(X)
    info, channels = features.feature_info, network.num_features
    assert (info.channels(), info.reduction()) == ([channels] * 2, [8] * 2)
    assert info.module_name() == ["blocks.0", "blocks.1"]
    assert len(seen) == 2
    assert all(map(torch.equal, features(X), seen))


def test_features_only_takes_the_last_blocks():
    model = create("mixer_ss8_32", features_only=True, depth=5)
    assert model.feature_info.module_name() == ["blocks.2", "blocks.3", "blocks.4"]
    assert len(model(X)) == 3
    chosen = create("mixer_ss8_32", features_only=True, depth=5, out_indices=(0, 3))
    assert chosen.feature_info.module_name() == ["blocks.0", "blocks.3"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mixer_ss_w_32", "have no grid"),
        ("ff_only_b16_224", "its features are not a map"),
        ("shallow_monarch_4096_32", "its features are not a map"),
    ],
)
def test_features_without_a_grid_are_refused_as_maps(name, message):
    with pytest.raises(InputError, match=message):
        create(name, features_only=True)(X)
    if name == "ff_only_b16_224":
        with pytest.raises(InputError, match="its features are not a map; use forward_features"):
            create(name).forward_intermediates(X)


@pytest.mark.parametrize("name", ["mixer_ss8_32", "mixer_ss_w_32"])
@pytest.mark.parametrize("norm", [False, True])
def test_intermediate_features_are_those_of_the_blocks_asked_for(name, norm):
    model = create(name, depth=3)
    blocks = [model.stem(X)]
    for block in model.blocks:
        blocks.append(block(blocks[-1]))
    keys = {"output_fmt": "NLC", "norm": norm}
    found = model.forward_intermediates(X, indices=[0, 2], intermediates_only=True, **keys)
    expected = [model.norm(blocks[i]) if norm else blocks[i] for i in (1, 3)]
    assert all(map(torch.equal, found, expected))
    assert len(found) == 2
    last, _ = model.forward_intermediates(X, indices=[0], stop_early=True, **keys)
    assert torch.equal(last, model.norm(blocks[1]))


@pytest.mark.parametrize("name", ["sw_mlp_1619_32", "mlp_b6_wi512_64"])
def test_layers_of_mlps_are_stem_blocks_and_what_follows(name):
    model = timm.create_model(name, num_classes=7, img_size=32, device="meta", **EVERY[name] | {"depth": 3})
    found = group_parameters(model, model.group_matcher(), reverse=True)
    for parameter, number in found.items():
        part, *names = parameter.split(".")
        assert number == (1 + int(names[0]) if part == "blocks" else {"stem": 0, "norm": 3}.get(part, 4)), parameter
    assert len({*found.values()}) == 5


@pytest.mark.parametrize("name", EVERY)
def test_it_is_made_where_and_as_what_is_asked_for(name):
    """As timm's tests of its own models ask: on a device, in a type, without arguments it does not know."""
    model = timm.create_model(name, device="meta", dtype=torch.float64, **EVERY[name])
    tensors = model.state_dict().values()
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float64}
    model.requires_grad_(False).reset_classifier(0)
    assert not [key for key, parameter in model.named_parameters() if parameter.requires_grad]
    model.reset_classifier(2)
    assert model.head.weight.is_meta
    assert model.head.weight.dtype == torch.float64
    with pytest.raises(TypeError, match="mlp_ratio"):
        timm.create_model(name, device="meta", **EVERY[name], mlp_ratio=2.0)
