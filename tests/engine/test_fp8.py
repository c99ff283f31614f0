"""float8 products: what torchao's emulation computes, against products of numbers rounded by hand."""

import sys
import types
from contextlib import nullcontext
from importlib.machinery import ModuleSpec

import pytest
import torch
from torch import nn

from widemix.distributed.topology import Topology
from widemix.engine import check_engine
from widemix.engine.fp8 import check_fp8, multiply_in_fp8
from widemix.errors import InputError
from widemix.models.mixer.section import MixerSection
from widemix.models.registry import build_model
from widemix.recipe import load_recipe

CPU = torch.device("cpu")


def rounded(x, kind):
    """The numbers of a tensor in 8 bits, with the largest scale of a power of two at which none is too large."""
    scale = 2.0 ** torch.floor(torch.log2(torch.finfo(kind).max / x.float().abs().max()))
    return (x.float() * scale).to(kind).float() / scale


def mixer(side=16, kind="mixer", **values):
    torch.manual_seed(0)
    sizes = {"channels": 32, "patch_size": 4, "depth": 1}
    sizes |= {"token_hidden": 32, "channel_hidden": 48} if kind == "mixer" else {}
    return build_model(MixerSection(kind=kind, **sizes, **values), side, 10)


def test_a_layer_is_the_product_of_rounded_numbers():
    pytest.importorskip("torchao")
    network = mixer()
    multiply_in_fp8(network, CPU)
    layer = network.blocks[0].mlp_channels.fc1
    x = torch.randn(6, 32, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randn(6, 48, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    for_x, for_weight = torch.autograd.grad(output, [x, layer.weight], target)
    small, large = torch.float8_e4m3fn, torch.float8_e5m2
    inputs, weight, gradient = rounded(x, small), rounded(layer.weight.detach(), small), rounded(target, large)
    bf16 = {"rtol": 2**-7, "atol": 2**-7}  # results are bf16
    assert torch.allclose(output.float(), inputs @ weight.T + layer.bias, **bf16)
    assert torch.allclose(for_x.float(), gradient @ weight, **bf16)
    assert torch.allclose(for_weight.float(), gradient.T @ inputs, rtol=2**-7, atol=2**-5)
    assert not torch.allclose(output.float(), x.float() @ layer.weight.T + layer.bias, **bf16)


@pytest.mark.parametrize(("kind", "layers"), [("mixer", ["fc1", "fc2"]), ("s_mixer", ["fc"])])
def test_the_mixings_alone_are_changed(kind, layers):
    pytest.importorskip("torchao")
    plain, network = mixer(kind=kind).eval(), mixer(kind=kind).eval()
    names = [name for name, _ in network.named_parameters()]
    multiply_in_fp8(network, CPU)
    changed = {name for name, part in network.named_modules() if type(part).__name__ == "Float8Linear"}
    assert changed == {f"blocks.0.mlp_{where}.{layer}" for where in ("tokens", "channels") for layer in layers}
    assert [name for name, _ in network.named_parameters()] == names
    x = torch.randn(2, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(network.forward_features(x), plain.forward_features(x))
        assert not torch.equal(network.train().forward_features(x), plain.forward_features(x))


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_a_gpu_takes_each_batch(batch, system):
    """Its products need sides that 16 divides; in the gradient of a weight one side is the batch times the rows."""
    pytest.importorskip("torchao")

    def scaled_mm(a, b, scale_a, scale_b, out_dtype, **_):
        scales = {"scale_a": scale_a.to("meta"), "scale_b": scale_b.to("meta"), "out_dtype": out_dtype}
        torch.ops.aten._scaled_mm(a.to("meta"), b.to("meta"), **scales)  # raises what CUDA would
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    system({"torch._scaled_mm": scaled_mm})
    x, found = torch.randn(batch, 3, 12, 12), []
    for device in (torch.device("cuda"), CPU):  # the latter emulates
        network = mixer(side=12)
        multiply_in_fp8(network, device)
        with torch.autocast("cpu", torch.bfloat16):
            features = network.train().forward_features(x)
        features.float().square().sum().backward()
        found.append([features, *(parameter.grad for parameter in network.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_layers_that_do_not_fit_are_left():
    pytest.importorskip("torchao")
    network = mixer(permutation="random")
    network.blocks[0].mlp_channels.fc1 = nn.Linear(32, 40)
    network.blocks[0].mlp_channels.fc2 = nn.Linear(40, 40)
    network.blocks[0].mlp_tokens.fc2 = nn.modules.linear.NonDynamicallyQuantizableLinear(32, 16)
    multiply_in_fp8(network, CPU)
    assert type(network.blocks[0].mlp_channels.fc1) is type(network.blocks[0].mlp_channels.fc2) is nn.Linear
    assert type(network.blocks[0].mlp_tokens.fc2) is nn.modules.linear.NonDynamicallyQuantizableLinear
    assert type(network.blocks[0].mlp_tokens.fc1).__name__ == "Float8Linear"
    with pytest.raises(InputError, match="no linear layer of a mixing has sides that are multiples of 16"):
        multiply_in_fp8(nn.Linear(32, 32), CPU)


def test_a_gpu_without_such_products_is_one_line(monkeypatch, system):
    recipe = load_recipe("digits/mixer", [("train.fp8", "true"), ("train.precision", "bf16")])
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(InputError, match="torchao is not installed"):
        check_engine(recipe.engine, recipe.optim, recipe.train, Topology(0, 1, 0, 1, CPU))
    there = types.ModuleType("torchao")
    there.__spec__ = ModuleSpec("torchao", None)
    monkeypatch.setitem(sys.modules, "torchao", there)
    system({"torch.cuda.get_device_name": lambda _: "V100"})
    for capability, has in (((7, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)):
        system({"torch.cuda.get_device_capability": lambda _, capability=capability: capability})
        with nullcontext() if has else pytest.raises(InputError, match="V100 has no float8 products"):
            check_fp8(torch.device("cuda"))
    check_fp8(CPU)  # which emulates them, beside whatever GPU


def test_a_torchao_too_new_for_this_torch_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)  # which makes its import fail
    with pytest.raises(InputError, match=r"torchao does not run with torch 2\S+ \(.*torchao.float8") as caught:
        multiply_in_fp8(mixer(), CPU)
    assert "\n" not in str(caught.value)
