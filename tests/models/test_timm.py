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
NAMES = {
    "mixer_ss8_32": SMALL,
    "rp_mixer_ss8_32": SMALL,
    "rp_s_mixer_ss8_32": {"depth": 2, "channels": 12},
    "mixer_ss_w_32": {**SMALL, "tokens": 5},  # projected from 64 tokens
}


def create(name, **kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, **{"num_classes": 7, **NAMES[name], **kwargs}).eval()
    if isinstance(model, nn.Module) and hasattr(model, "head") and isinstance(model.head, nn.Linear):
        nn.init.normal_(model.head.weight)
    return model


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_head_and_features_compose(name):
    model = create(name)
    features = model.forward_features(X)
    assert features.shape == (2, 5 if "ss_w" in name else 16, model.num_features)
    assert torch.equal(model.forward_head(features), model(X))
    assert torch.equal(model.head(model.forward_head(features, pre_logits=True)), model(X))
    assert model.get_classifier() is model.head
    assert model.pretrained_cfg["classifier"] == "head"
    assert isinstance(model.get_submodule(model.pretrained_cfg["first_conv"]), nn.Conv2d)


def test_classifier_can_go_and_come_back(name):
    model = create(name)
    pooled = model.forward_head(model.forward_features(X), pre_logits=True)
    model.reset_classifier(0)
    assert torch.equal(model(X), pooled)
    model.reset_classifier(0, "")
    assert torch.equal(model(X), model.forward_features(X))
    model.reset_classifier(4, "avg")
    assert model(X).shape == (2, 4)
    headless = create(name, num_classes=0)
    headless.load_state_dict({key: value for key, value in model.state_dict().items() if "head" not in key})
    assert torch.equal(headless(X), pooled)


def test_other_inputs(name):
    assert create(name, in_chans=1)(X[:, :1]).shape == (2, 7)
    model = create(name, img_size=64)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 7)
    with pytest.raises(AssertionError, match="doesn't match model"):
        model(X)


def test_gradient_checkpointing_changes_nothing_but_memory(name):
    model = create(name)
    outputs, gradients = [], []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        output = model(X)
        output.square().sum().backward()
        outputs.append(output)
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert torch.equal(*outputs)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.long
def test_compiles_without_graph_breaks(name):
    model = create(name).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(X), model(X), atol=1e-5)
    gradients = []
    for one in (compiled, model):
        model.zero_grad()
        one(X).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(*gradients, strict=True))


@pytest.mark.filterwarnings(SCRIPTS)
def test_scripts_and_exports(name):
    model = create(name)
    scripted = torch.jit.script(model)
    assert torch.allclose(scripted(X), model(X), atol=1e-6)
    exported = torch.export.export(model, (X,)).module()
    assert torch.allclose(exported(X), model(X), atol=1e-6)


def test_copies_are_whole_and_separate(name):
    model = create(name)
    twin = copy.deepcopy(model)
    before = model(X)
    with torch.no_grad():
        for tensor in [*twin.parameters(), *twin.buffers()]:
            tensor.zero_()
    assert torch.equal(model(X), before)
    assert torch.equal(model.train().train().eval()(X), before)


@pytest.mark.parametrize("name", [name for name in NAMES if "ss_w" not in name])
def test_features_only_gives_maps_of_the_blocks(name):
    maps = create(name, features_only=True)(X)
    assert [tuple(m.shape) for m in maps] == [(2, 12, 4, 4)] * 2
    x = create(name).stem(X)
    for block, m in zip(create(name).blocks, maps, strict=True):
        x = block(x)
        assert torch.equal(x.transpose(1, 2).unflatten(2, (4, 4)), m)


def test_features_only_takes_the_last_blocks_that_are_asked_for_or_three():
    model = create("mixer_ss8_32", features_only=True, depth=5)
    assert model.feature_info.module_name() == ["blocks.2", "blocks.3", "blocks.4"]
    assert len(model(X)) == 3
    chosen = create("mixer_ss8_32", features_only=True, depth=5, out_indices=(0, 3))
    assert chosen.feature_info.module_name() == ["blocks.0", "blocks.3"]


def test_features_of_projected_tokens_are_refused_as_maps():
    with pytest.raises(InputError, match="have no grid"):
        create("mixer_ss_w_32", features_only=True)(X)
    _, features = create("mixer_ss_w_32").forward_intermediates(X, output_fmt="NLC")
    assert features[-1].shape == (2, 5, 12)


OTHERS = {
    "sw_mlp_1619_32": {"width": 30, "depth": 2},
    "shallow_monarch_4096_32": {"width": 30},
    "shallow_kronecker_4096_32": {"width": 30},
    "s_fc_32": {"base_channels": 2},
    "s_local_32": {"base_channels": 2},
    "mlp_b6_wi512_64": {"width": 30, "depth": 2, "hidden": 12},
    "ff_only_b16_224": {"patch_size": 8, "channels": 16, "depth": 2},
    "permutator_s14_224": {"patch_size": 8, "channels": 16, "depth": 2},
    "repmlp_s16_224": {"patch_size": 8, "channels": 16, "depth": 2, "sets": 4},
}


@pytest.mark.filterwarnings(SCRIPTS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_keep_timms_interface(name):
    def create(**kwargs):
        torch.manual_seed(0)
        return timm.create_model(name, **{"num_classes": 7, "img_size": 32, **OTHERS[name], **kwargs}).eval()

    model = create()
    nn.init.normal_(model.head.weight)
    features = model.forward_features(X)
    assert torch.equal(model.forward_head(features), model(X))
    assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features)
    assert create(in_chans=1)(X[:, :1]).shape == (2, 7)
    assert create(img_size=64)(torch.randn(2, 3, 64, 64)).shape == (2, 7)
    assert create(num_classes=0)(X).shape == (2, model.num_features)
    assert torch.equal(create(img_size=(32, 32)).forward_features(X), features)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(X), model(X))
    scripted = torch.jit.script(model)
    assert torch.allclose(scripted(X), model(X), atol=1e-5)
    plain = torch.autograd.grad(model(X).sum(), list(model.parameters()))
    twin.set_grad_checkpointing()
    saving = torch.autograd.grad(twin(X).sum(), list(twin.parameters()))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(plain, saving, strict=True))
    twin.reset_classifier(3)
    assert (twin.num_classes, twin.head.training, twin.get_classifier() is twin.head) == (3, False, True)
    assert twin.train().train()(X).shape == (2, 3)


@pytest.mark.parametrize("name", ["ff_only_b16_224", "repmlp_s16_224"])
def test_an_image_need_not_be_square(name):
    model = timm.create_model(name, num_classes=7, img_size=(16, 32), **OTHERS[name]).eval()
    assert model.stem.grid_size == (2, 4)
    assert model(torch.randn(2, 3, 16, 32)).shape == (2, 7)


@pytest.mark.parametrize("name", ["sw_mlp_1619_32", "mlp_b6_wi512_64"])
def test_layers_of_mlps_are_stem_blocks_and_what_follows(name):
    model = timm.create_model(name, num_classes=7, img_size=32, device="meta", **OTHERS[name] | {"depth": 3})
    found = group_parameters(model, model.group_matcher(), reverse=True)
    for parameter, number in found.items():
        part, *names = parameter.split(".")
        assert number == (1 + int(names[0]) if part == "blocks" else {"stem": 0, "norm": 3}.get(part, 4)), parameter
    assert len({*found.values()}) == 5


EVERY = {**NAMES, **OTHERS, "text_mixer": {}, "text_transformer": {}}


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
