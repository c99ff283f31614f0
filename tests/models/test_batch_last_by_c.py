"""Blocks by compiled code, against autograd in fp64 of the block as it is written."""

import copy
import ctypes
import platform
import subprocess

import pytest
import torch
from torch import nn

from widemix.models.batch_last import by_c
from widemix.models.mixer.blocks import MixerBlock, MixerShape
from widemix.native import BuildError
from widemix.native.build import _FLAGS, SOURCES

MLP = {"token_hidden": 9, "channel_hidden": 5}
RANDOM = {"permutation": "random"}
SHAPES = {
    "s_mixer": {},
    "rp s_mixer": RANDOM,
    "skips": RANDOM | {"permuted_skips": True},
    "projection": {"tokens": 10},
    "rp projection": RANDOM | {"tokens": 10, "norm": "none", "activation": "square"},
    "mixer": MLP,
    "each layer and skip": MLP | RANDOM | {"permuted_layers": "each", "permuted_skips": True},
    "mixer projection": MLP | {"tokens": 10},
    "no norm": MLP | RANDOM | {"norm": "none", "activation": "square"},
    "tanh": MLP | RANDOM | {"activation": "gelu_tanh", "drop_path_rate": 0.4},
    "wide": {"token_hidden": 70, "channel_hidden": 140},
}
SIZES = [(1, 1), (1, 33), (7, 33), (33, 7), (33, 1), (16, 24), (50, 51)]  # tokens, channels
# Vectors as wide as those of plain C and of AVX-512, by other instructions.
MACHINES = {"sse": ["-march=x86-64"], "wide": ["-march=x86-64-v3", "-DLANES=16"]}


def make(tokens_in: int, channels: int, **keys) -> MixerBlock:
    """A block in training with random parameters, computed by the compiled code."""
    torch.manual_seed(0)
    shape = {"token_hidden": None, "channel_hidden": None, "channels": channels, "depth": 1} | keys
    block = MixerBlock(MixerShape(**shape), 0, tokens_in)
    for name, parameter in block.named_parameters():
        is_gain = name.endswith("weight") and parameter.ndim == 1
        nn.init.normal_(parameter, float(is_gain), 0.3 if parameter.ndim == 1 else parameter.shape[1] ** -0.5)
    block.batch_last = True
    return block.train()


def step(block: MixerBlock, x: torch.Tensor) -> list[torch.Tensor]:
    """The output and all gradients, by the same drop path."""
    x = x.clone().requires_grad_()
    block.zero_grad()
    torch.manual_seed(1)
    y = block(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    return [y.detach(), x.grad, *(parameter.grad for parameter in block.parameters())]


def exact_step(block: MixerBlock, x: torch.Tensor) -> list[torch.Tensor]:
    plain = copy.deepcopy(block).double()
    plain.batch_last = False
    return step(plain, x.double())


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    """Relative to the largest number of each tensor; some gradients are zero but for rounding."""
    largest = max(float(tensor.abs().max()) for tensor in expected)
    for one, other in zip(found, expected, strict=True):
        error, size = (one.double() - other).abs().max(), other.abs().max()
        assert one.shape == other.shape
        assert error <= tolerance * max(float(size), 0.05 * largest), (tuple(other.shape), float(error), float(size))


@pytest.fixture
def compiled_for(request, tmp_path, monkeypatch):
    """The library of another machine, in place of this one's."""
    library = tmp_path / "block.so"
    sources = ["-shared", "-fPIC", "-Wno-psabi", "-o", library, SOURCES / "mixer_block.c", "-lm"]
    subprocess.run(["cc", *_FLAGS, *MACHINES[request.param], *sources], check=True)
    monkeypatch.setattr(by_c, "open_library", lambda: ctypes.CDLL(str(library)))
    by_c._library.cache_clear()
    yield
    by_c._library.cache_clear()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_is_that_of_the_block_as_it_is_written(shape, size):
    block = make(*size, **SHAPES[shape])
    scale_free = size[0] == 1 and "projection" in shape  # LN(w x) has no gradient by w but for rounding
    for batch in (1, 21, 32):
        x = torch.randn(batch, *size)
        assert by_c.takes(block, x)
        assert_near(step(block, x), exact_step(block, x), 1e-4 if scale_free else 1e-5)


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64's instructions")
@pytest.mark.parametrize("compiled_for", MACHINES, indirect=True)
def test_a_step_is_the_same_on_other_machines(compiled_for):
    for shape in SHAPES.values():
        for size in ((7, 33), (50, 24)):
            block, x = make(*size, **shape), torch.randn(21, *size)
            assert_near(step(block, x), exact_step(block, x))


@pytest.mark.parametrize("shape", ["rp s_mixer", "each layer and skip", "mixer projection"])
@pytest.mark.parametrize("batch", [100, 300])
def test_the_bits_do_not_depend_on_the_threads(shape, batch):
    block, x = make(20, 32, **SHAPES[shape]), torch.randn(batch, 20, 32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 7, 1):
            torch.set_num_threads(threads)
            results.append(step(block, x))
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, each, results[0])) for each in results)


def test_sums_over_many_images_are_near():
    block, x = make(12, 20, **SHAPES["each layer and skip"]), torch.randn(3000, 12, 20)
    assert_near(step(block, x), exact_step(block, x))


def test_bf16_features_are_rounded_once():
    block, x = make(7, 18, **SHAPES["skips"]), torch.randn(21, 7, 18).bfloat16()
    y, dx, *gradients = step(block, x)
    expected_y, expected_dx, *expected = step(block, x.float())
    assert y.dtype == dx.dtype == torch.bfloat16
    assert torch.equal(y, expected_y.bfloat16())
    assert_near([dx, *gradients], [each.double() for each in (expected_dx, *expected)], 2e-2)  # as g is rounded too


def test_bf16_between_two_numbers_is_rounded_to_the_even_one():
    block = make(1, 4, norm="none", activation="square")
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    nn.init.ones_(block.mlp_tokens.fc.bias)
    x = torch.arange(256.0, 512.0, 2).bfloat16().view(-1, 1, 4)
    assert torch.equal(block(x), (x.float() + 1).bfloat16())


def test_bf16_that_is_no_number_stays_none():
    x = torch.ones(9, 7, 18).bfloat16()
    x[4] = torch.nan
    y = make(7, 18, **SHAPES["skips"])(x)
    assert y[4].isnan().all()
    assert y[[0, 3, 5, 8]].isfinite().all()


def lone_activation(activation: str, channels: int = 1) -> MixerBlock:
    """[B, 1, C] -> phi(norm(x)): no skip, and a second mixing that gives zeros."""
    block = make(1, channels, tokens=1, norm="none" if channels == 1 else "layer", activation=activation)
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    nn.init.ones_(block.mlp_tokens.fc.weight)
    if channels > 1:
        nn.init.ones_(block.norm1.weight)
    return block


@pytest.mark.parametrize(("activation", "slope_error"), [("gelu", 5e-7), ("gelu_tanh", 2.5e-6)])
def test_gelu_and_its_slope_everywhere(activation, slope_error):
    """Against fp64; where PyTorch's own fp32 is off by 1.2e-7 x in the tails, ours may not be farther off."""
    x = torch.cat([torch.linspace(-20, 20, 400_001), torch.tensor([-0.0, 1e-30, -1e-30])])
    inputs = x[:, None, None].clone().requires_grad_()
    y = lone_activation(activation)(inputs)
    y.sum().backward()
    exact = x.double().requires_grad_()
    value = nn.functional.gelu(exact, approximate="tanh" if activation == "gelu_tanh" else "none")
    value.sum().backward()
    assert ((y.flatten() - value) / exact.abs().clamp(1)).abs().max() < 2.5e-7
    assert (inputs.grad.flatten() - exact.grad).abs().max() < slope_error


def test_gelu_of_very_large_numbers():
    x = torch.tensor([3e38, -3e38])[:, None, None]
    for activation in ("gelu", "gelu_tanh"):
        assert lone_activation(activation)(x).flatten().tolist() == [float(x[0]), 0.0]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="they are zeros on x86 alone")
@pytest.mark.parametrize("flushes", [False, True])
def test_numbers_below_the_normal_ones_are_zero_there_and_nowhere_else(flushes):
    """Far below zero GELU's slope times a gradient is one of these, with which an x86 computes slowly.

    flushes: what the caller has chosen for its own, which stays.
    """
    x = torch.full((9, 1, 1), -14.0, requires_grad=True)
    torch.set_flush_denormal(flushes)
    try:
        lone_activation("gelu")(x).backward(torch.full((9, 1, 1), 1e-3))
        product = float(torch.tensor([1e-30]) * torch.tensor([1e-10]))
        assert product == 0 if flushes else product == pytest.approx(1e-40, rel=1e-4, abs=0)
    finally:
        torch.set_flush_denormal(False)
    assert x.grad.abs().view(torch.int32).max() == 0


def test_a_mean_far_above_the_deviation_is_taken_out():
    x = torch.randn(20, 1, 768) + 1e3
    block = lone_activation("gelu", 768)
    expected = nn.functional.gelu(nn.functional.layer_norm(x.double(), [768], eps=block.norm1.eps))
    assert (block(x) - expected).norm() < 5e-5 * expected.norm()
    assert block(x[:, :, :1].expand(20, 1, 768) * 1e5).isfinite().all()


def test_a_number_that_is_not_one_stays_with_its_image():
    block, x = make(7, 33, **SHAPES["rp s_mixer"]), torch.randn(21, 7, 33)
    x[10, 3, 5] = torch.nan
    y = block(x)
    assert y[10].isnan().any()
    assert y[torch.arange(21) != 10].isfinite().all()
    y.sum().backward()
    assert block.mlp_tokens.fc.weight.grad.isnan().all()


@pytest.mark.parametrize("wrong", [-1, 231, 2**31 - 1])
@pytest.mark.parametrize(
    "name", ["mlp_tokens.permute_in", "mlp_tokens.permute_out", "mlp_channels.permute_hidden", "skip"]
)
def test_an_index_out_of_range_is_refused(name, wrong):
    block, x = make(7, 33, **SHAPES["each layer and skip"]), torch.randn(5, 7, 33)
    block(x)
    block.get_submodule(name).index.numpy()[5] = wrong  # which PyTorch does not notice
    with pytest.raises(IndexError, match="index out of range"):
        block(x)


def test_permutations_of_another_size_are_refused():
    block = make(7, 33, **SHAPES["skips"])
    block.skip = make(7, 34, **SHAPES["skips"]).skip
    with pytest.raises(ValueError, match="a permutation of another size"):
        block(torch.randn(5, 7, 33))


def test_other_layers_are_followed():
    block, x = make(7, 33, **SHAPES["rp s_mixer"]), torch.randn(5, 7, 33)
    step(block, x)
    other = make(7, 33, **SHAPES["each layer and skip"])
    block.mlp_tokens, block.skip = other.mlp_tokens, other.skip
    assert_near(step(block, x), exact_step(block, x))
    block.mlp_channels.act, block.norm2.eps = nn.GELU(approximate="tanh"), 0.1
    assert_near(step(block, x), exact_step(block, x))


def test_frozen_weights_and_inputs_without_gradients():
    block, x = make(7, 33, **SHAPES["mixer"]), torch.randn(5, 7, 33)
    expected = exact_step(block, x)
    block.norm1.requires_grad_(False)
    block.zero_grad()
    y = block(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
    trained = [(p.grad, e) for p, e in zip(block.parameters(), expected[2:], strict=True) if p.requires_grad]
    assert_near(*map(list, zip(*trained, strict=True)))
    assert block.norm1.weight.grad is None
    with torch.no_grad():
        assert torch.equal(block(x), y)


def test_what_it_does_not_compute_is_left_to_pytorch(monkeypatch):
    block, x = make(7, 33, **SHAPES["mixer"]), torch.randn(5, 7, 33)
    expected = exact_step(block, x)
    assert not by_c.takes(block, x.half())
    assert not by_c.takes(block, x.double())
    assert not by_c.takes(block, x.to("meta"))

    def fail():
        raise BuildError("there is no C compiler")

    by_c._library.cache_clear()
    with monkeypatch.context() as context:
        context.setattr(by_c, "open_library", fail)
        assert not by_c.takes(block, x)
        assert_near(step(block, x), expected)
    by_c._library.cache_clear()
    assert by_c.takes(block, x)
    block.mlp_tokens.act = nn.Identity()
    assert not by_c.takes(block, x)
    assert_near(step(block, x), exact_step(block, x))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_is_not_that_of_sums(default):
    block, x = make(7, 33, **SHAPES["each layer and skip"]), torch.randn(21, 7, 33)
    expected = step(block, x)
    g = torch.randn(expected[0].shape, generator=torch.Generator().manual_seed(2))
    torch.set_default_dtype(default)
    try:
        x = x.clone().requires_grad_()
        block.zero_grad()
        y = block(x)
        y.backward(g)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, [y, x.grad, *(parameter.grad for parameter in block.parameters())], expected))
