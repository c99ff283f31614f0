"""FF-only, Vision Permutator and RepMLP against formulas written out place by place."""

import pytest
import timm
import torch
from torch.nn.functional import batch_norm, conv2d, gelu, layer_norm

from widemix.errors import InputError
from widemix.models.cost import model_cost
from widemix.models.ff_only.network import FfOnly
from widemix.models.ff_only.section import FfOnlySection
from widemix.models.permutator.network import PermuteMlp
from widemix.models.permutator.section import PermutatorSection
from widemix.models.registry import build_model
from widemix.models.repmlp.network import RepMlp
from widemix.models.repmlp.section import RepMlpSection
from widemix.models.timm_mlp.section import GmlpSection, ResMlpSection
from widemix.models.timm_model.section import TimmSection

SHAPE = {"patch_size": 2, "channels": 8, "depth": 2, "expansion": 1.5}
FF_ONLY = FfOnlySection(kind="ff_only", **SHAPE)
PERMUTATOR = PermutatorSection(kind="permutator", **SHAPE)
REPMLP = RepMlpSection(kind="repmlp", **SHAPE, share_sets=2, kernels=[1, 3])


def build(section, seed=0):
    torch.manual_seed(seed)
    model = build_model(section, image_size=8, num_classes=5).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    return model.eval()


X = torch.randn(3, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def mlp(module, x):
    hidden = gelu(x @ module.fc1.weight.T + module.fc1.bias)
    return hidden @ module.fc2.weight.T + module.fc2.bias


def ln(module, x):
    return layer_norm(x, x.shape[-1:], module.weight, module.bias, 1e-6)


def patches(model):
    kernel = model.stem.proj
    return conv2d(X, kernel.weight, kernel.bias, stride=2).flatten(2).transpose(1, 2)


def test_ff_only_is_its_formula():
    model = build(FF_ONLY)
    assert isinstance(model, FfOnly)
    x = torch.cat([model.cls_token.expand(3, 1, 8), patches(model)], 1) + model.pos_embed
    for block in model.blocks:
        x = x + mlp(block.mlp1, ln(block.norm1, x))
        x = x + torch.stack([mlp(block.mlp2, ln(block.norm2, one.T)).T for one in x])
    expected = ln(model.norm, x)[:, 0] @ model.head.weight.T + model.head.bias
    assert torch.allclose(model(X), expected, atol=1e-10)


def test_permute_mlp_is_its_formula_place_by_place():
    side, channels = 4, 8
    torch.manual_seed(1)
    module = PermuteMlp(side, channels).double()
    x = torch.randn(2, side * side, channels, dtype=torch.float64)
    grid, part = x.view(2, side, side, channels), channels // side
    along_h, along_w = torch.zeros_like(grid), torch.zeros_like(grid)
    for segment in range(side):
        of = slice(segment * part, (segment + 1) * part)
        for line in range(side):
            column = module.mlp_h(torch.cat([grid[:, place, line, of] for place in range(side)], 1))
            row = module.mlp_w(torch.cat([grid[:, line, place, of] for place in range(side)], 1))
            for place in range(side):
                along_h[:, place, line, of] = column[:, place * part : (place + 1) * part]
                along_w[:, line, place, of] = row[:, place * part : (place + 1) * part]
    along_c = grid @ module.mlp_c.weight.T
    logits = mlp(module.reweight, (along_h + along_w + along_c).mean((1, 2)))
    weight = torch.exp(logits.view(2, channels, 3))
    weight = (weight / weight.sum(2, keepdim=True))[:, None, None]
    mixed = along_h * weight[..., 0] + along_w * weight[..., 1] + along_c * weight[..., 2]
    assert torch.allclose(module(x), module.proj(mixed).flatten(1, 2), atol=1e-12)


def test_permutator_is_its_formula():
    model = build(PERMUTATOR)
    x = patches(model)
    for block in model.blocks:
        x = x + block.mix(ln(block.norm1, x))
        x = x + mlp(block.mlp, ln(block.norm2, x))
    expected = ln(model.norm, x).mean(1) @ model.head.weight.T + model.head.bias
    assert torch.allclose(model(X), expected, atol=1e-10)


def test_repmlp_mixing_is_its_formula_channel_by_channel():
    model = build(REPMLP)
    block = model.blocks[0]
    x = torch.randn(3, 16, 8, dtype=torch.float64)
    first, _, second, _ = block.gate
    gate = torch.sigmoid(second(torch.relu(first(x.mean(1)))))
    expected = torch.zeros_like(x)
    for channel in range(8):
        group = channel % 2

        def norm(values, module, group=group):
            parts = (module.running_mean, module.running_var, module.weight, module.bias)
            return batch_norm(values[:, None], *(part[group : group + 1] for part in parts))[:, 0]

        out = norm(x[:, :, channel] @ block.perceptron.dense.weight[group].T, block.perceptron.norm)
        for local in block.perceptron.local:
            image = x[:, :, channel].view(3, 1, 4, 4)
            kernel = local.conv.weight[group : group + 1]
            answer = conv2d(image, kernel, padding=kernel.shape[-1] // 2)
            out = out + norm(answer.flatten(1), local.norm)
        expected[:, :, channel] = out * gate[:, channel : channel + 1]
    assert torch.allclose(block.mix(x), expected, atol=1e-10)


def test_repmlp_is_its_formula():
    model = build(REPMLP)

    def norm(module, x):
        module = module.norm
        return (x - module.running_mean) / (module.running_var + 1e-5).sqrt() * module.weight + module.bias

    x = patches(model)
    for block in model.blocks:
        x = x + block.mix(norm(block.norm1, x))
        first, its_norm, _, second, last_norm = block.ffn
        hidden = gelu(norm(its_norm, norm(block.norm2, x) @ first.weight.T))
        x = x + norm(last_norm, hidden @ second.weight.T)
    expected = ln(model.norm, x).mean(1) @ model.head.weight.T + model.head.bias
    assert torch.allclose(model(X), expected, atol=1e-10)


@pytest.mark.parametrize("section", [FF_ONLY, PERMUTATOR, REPMLP], ids=lambda section: section.kind)
def test_baselines_take_timms_dropout_and_pooling(section):
    network, arguments = section.model_spec(8)
    model = network(**arguments, num_classes=5, in_chans=1, drop_rate=0.25, global_pool="")
    assert model.head_drop.p == 0.25
    tokens = 17 if section.kind == "ff_only" else 16
    x = torch.randn(2, 1, 8, 8)
    assert model(x).shape == (2, tokens, 5)
    assert model.forward_head(model.forward_features(x), pre_logits=True).shape == (2, tokens, 8)


def test_what_ff_only_adds_to_the_tokens_starts_small():
    torch.manual_seed(0)
    model = build_model(FfOnlySection(kind="ff_only", patch_size=1, channels=400, depth=1), 8, 5)
    for parameter in (model.cls_token, model.pos_embed):
        assert parameter.std().item() == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize("section", [FF_ONLY, PERMUTATOR, REPMLP], ids=lambda section: section.kind)
def test_first_weights_have_the_variance_of_their_inputs_and_the_head_none(section):
    torch.manual_seed(0)
    model = build_model(section.model_copy(update={"channels": 160, "expansion": 3.0}), 8, 5)
    layers = [part for part in model.blocks.modules() if isinstance(part, torch.nn.Linear)]
    for layer in layers:
        assert layer.weight.std().item() == pytest.approx(layer.in_features**-0.5, rel=0.2)
        assert layer.bias is None or not layer.bias.any()
    kernel = model.stem.proj
    assert kernel.weight.std().item() == pytest.approx((3 * 2 * 2) ** -0.5, rel=0.1)
    assert not torch.cat([kernel.bias, model.head.bias, model.head.weight.flatten()]).any()


def test_repmlp_fuses_exactly_into_plain_layers():
    model = build(REPMLP)
    assert isinstance(model, RepMlp)
    fused = model.train().fused()
    assert model.training
    assert torch.allclose(fused(X), model.eval()(X), atol=1e-10)
    kinds = {type(module).__name__ for module in fused.blocks.modules()}
    assert not kinds & {"Conv2d", "LocalPerceptron"}
    norms = [name for name, module in fused.blocks[0].named_modules() if isinstance(module, torch.nn.BatchNorm1d)]
    assert norms == ["norm1.norm", "norm2.norm"]
    assert any(isinstance(module, torch.nn.Conv2d) for module in model.blocks.modules())


@pytest.mark.long
@pytest.mark.parametrize("section", [FF_ONLY, PERMUTATOR, REPMLP], ids=lambda section: section.kind)
def test_baselines_compile_and_take_gradients(section):
    model = build(section)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(X), model(X), atol=1e-10)
    model.train()(X).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("resmlp_12_224", ResMlpSection(kind="resmlp", patch_size=16, channels=384, depth=12)),
        ("resmlp_24_224", ResMlpSection(kind="resmlp", patch_size=16, channels=384, depth=24, layer_scale=1e-5)),
        ("gmlp_ti16_224", GmlpSection(kind="gmlp", patch_size=16, channels=128, depth=30)),
    ],
)
def test_of_timms_sizes_they_are_timms(name, section):
    """With weights of the same random numbers, at first, and with others."""
    torch.manual_seed(0)
    model = build_model(section, image_size=32, num_classes=7).eval()
    torch.manual_seed(0)
    theirs = timm.create_model(name, img_size=32, num_classes=7).eval()
    x = torch.randn(2, 3, 32, 32)
    for parameter, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(parameter, other)
        parameter.data += 0.1 * torch.randn_like(parameter)
        other.data.copy_(parameter.data)
    assert torch.equal(model(x), theirs(x))


@pytest.mark.parametrize("section", [FF_ONLY, PERMUTATOR, REPMLP], ids=lambda section: section.kind)
def test_of_the_least_expansion_there_is_one_hidden_feature(section):
    """timm's Mlp takes 0 for as many as inputs."""
    section = section.model_copy(update={"expansion": 0.01})
    model = build_model(section, image_size=8, num_classes=5)
    widths = {layer.out_features for layer in model.blocks.modules() if isinstance(layer, torch.nn.Linear)}
    assert 1 in widths
    assert model_cost(section, 8, 5).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_hidden_features_that_gate_need_halves():
    """9 and 10 of 8 channels, rounded down as timm does."""
    assert GmlpSection(kind="gmlp", **SHAPE | {"expansion": 1.26}).expansion == 1.26
    with pytest.raises(ValueError, match="gives 9 hidden features of 8 channels, which have no halves"):
        GmlpSection(kind="gmlp", **SHAPE | {"expansion": 1.24})


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resmlp_12_224", "gmlp_ti16_224"])
def test_timms_networks_come_from_timm(name):
    model = build_model(TimmSection(kind="timm", name=name), image_size=32, num_classes=7)
    theirs = timm.create_model(name, img_size=32, num_classes=7)
    theirs.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.eval()(x), theirs.eval()(x))


def test_timms_networks_take_its_arguments():
    arguments = {"patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "act_layer": "relu", "qkv_bias": False}
    section = TimmSection(kind="timm", name="vit_tiny_patch16_224", drop_path=0.5, arguments=arguments)
    model = build_model(section, image_size=8, num_classes=7)
    theirs = timm.create_model(section.name, img_size=8, num_classes=7, drop_path_rate=0.5, **arguments)
    assert str(model) == str(theirs)
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in theirs.state_dict().items()
    }
    stages = {"layers": [1, 2, 1, 1], "channels": [8, 8, 16, 16]}
    model = build_model(TimmSection(kind="timm", name="resnet18", arguments=stages), image_size=32, num_classes=7)
    assert str(model) == str(timm.create_model("resnet18", num_classes=7, **stages))


def test_networks_that_know_no_stochastic_depth_are_made_without():
    """VGG, DenseNet, HRNet, RepVit and others: 21 of timm's 98 files of networks."""
    section = TimmSection(kind="timm", name="ghostnet_050")
    assert str(build_model(section, 32, 7)) == str(timm.create_model("ghostnet_050", num_classes=7))
    assert section.timm_spec(32, ()) == ("ghostnet_050", {})
    with pytest.raises(InputError, match=r"ghostnet_050: timm's network is not made with drop_path_rate 0\.1 "):
        build_model(TimmSection(kind="timm", name="ghostnet_050", drop_path=0.1), 32, 7)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "resnet18"}, "name is model.name"),
        ({"num_classes": 3}, "num_classes is data.num_classes"),
        ({"img_size": 32}, "img_size is data.image_size"),
        ({"drop_path_rate": 0.1}, "drop_path_rate is model.drop_path"),
        ({"in_chans": 1}, "in_chans is 3"),
        ({"features_only": True}, "features_only is not for networks that classify"),
        ({"cache_dir": "x"}, "cache_dir is not for"),
        ({"state_dict": "x"}, "state_dict is not for"),
        ({"pretrained": True}, "pretrained is not for networks that train; weights come by train.init_from"),
        ({"pretrained_cfg": "x"}, "pretrained_cfg is not for"),
        ({"checkpoint_path": "weights.pth"}, "checkpoint_path is not for"),
        ({"embed_dim": {"a": 1}}, "embed_dim"),
    ],
)
def test_arguments_of_other_keys_and_of_files_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        TimmSection(kind="timm", name="vit_tiny_patch16_224", arguments=arguments)


def test_wrong_shapes_and_names_are_refused():
    for arguments in ({"depht": 2}, {"embed_dim": 13, "num_heads": 3}):
        with pytest.raises(InputError, match=f"vit_tiny_patch16_224: .* is not made with {next(iter(arguments))} "):
            build_model(TimmSection(kind="timm", name="vit_tiny_patch16_224", arguments=arguments), 32, 10)
    with pytest.raises(InputError, match="no network called vit_tinny"):
        build_model(TimmSection(kind="timm", name="vit_tinny_patch16_224"), 224, 10)
    with pytest.raises(ValueError, match="channels 8 do not divide by the grid's side 3"):
        PERMUTATOR.check_image_size(6)
    with pytest.raises(ValueError, match="share_sets 3 does not divide channels 8"):
        RepMlpSection(kind="repmlp", **SHAPE, share_sets=3)
    with pytest.raises(ValueError, match=r"kernels \[1, 4\] must be odd"):
        RepMlpSection(kind="repmlp", **SHAPE, share_sets=2, kernels=[1, 4])
    for section in (FF_ONLY, PERMUTATOR, REPMLP):
        section.check_image_size(8)
        with pytest.raises(ValueError, match=r"patch_size 2 does not divide data\.image_size 9; 3, 9 would"):
            section.check_image_size(9)


@pytest.mark.parametrize(("name", "size", "channels"), [("permutator_s14_224", 28, 384), ("repmlp_s16_224", 32, 512)])
def test_timms_features_are_the_maps_of_the_blocks(name, size, channels):
    options = {"img_size": size, "depth": 2}
    torch.manual_seed(0)
    network = timm.create_model(name, **options).eval()
    features = timm.create_model(name, features_only=True, **options).eval()
    features.model.load_state_dict(network.state_dict(), strict=False)
    images, seen = torch.randn(2, 3, size, size), []
    for block in network.blocks:
        block.register_forward_hook(lambda *call: seen.append(call[2].transpose(1, 2).reshape(2, channels, 2, 2)))
    network(images)
    info = features.feature_info
    assert (info.channels(), info.reduction()) == ([channels] * 2, [size // 2] * 2)
    assert info.module_name() == ["blocks.0", "blocks.1"]
    for found, expected in zip(features(images), seen, strict=True):
        assert torch.equal(found, expected)


def test_features_behind_a_class_token_are_no_maps():
    with pytest.raises(InputError, match="its features are not a map"):
        timm.create_model("ff_only_b16_224", img_size=32, depth=1, features_only=True)
    with pytest.raises(InputError, match="its features are not a map; use forward_features"):
        timm.create_model("ff_only_b16_224", img_size=32, depth=1).forward_intermediates(torch.zeros(1, 3, 32, 32))
