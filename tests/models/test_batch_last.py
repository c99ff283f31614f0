"""Blocks with the batch last in memory, by rows and by compiled code, against the blocks as they are written."""

import ctypes
import platform
import subprocess
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap

from tests.models.blocks import (
    NETWORKS,
    SHAPES,
    assert_near,
    distance,
    exact_step,
    make_block,
    make_mixer,
    make_networks,
    step,
)
from widemix.models import permutation
from widemix.models.batch_last import by_c, by_torch, operations
from widemix.models.batch_last.block import arrange, needs_eager_ops, places_of
from widemix.models.batch_last.operations import activate, add, norm
from widemix.models.mixer.network import Mixer
from widemix.native import BuildError
from widemix.native.build import FLAGS, SOURCES

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
NEAR = {FP64: 1e-11, FP32: 2e-5}
SIZES = [(1, 1), (1, 33), (7, 33), (33, 7), (33, 1), (16, 24), (50, 51)]  # tokens, channels
# Vectors as wide as those of plain C and of AVX-512, by other instructions.
MACHINES = {"sse": ["-march=x86-64"], "wide": ["-march=x86-64-v3", "-DLANES=16"]}
EACH = "each layer and skip"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_blocks_step_in_fp32_is_that_in_fp64(shape, size):
    """By compiled code."""
    block = make_block(*size, shape)
    scale_free = size[0] == 1 and "projection" in shape  # LN(w x) has no gradient by w but for rounding
    for batch in (1, 21, 32):
        x = torch.randn(batch, *size)
        assert by_c.takes(block, x)
        assert_near(step(block, x), exact_step(block, x), 1e-4 if scale_free else 1e-5)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("batch", [0, 1, 5, 64])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [FP64, FP32], ids=str)
@pytest.mark.parametrize("shape", NETWORKS)
def test_a_networks_step_is_that_of_plain_blocks(shape, dtype, memory_format, batch):
    plain, other = make_networks(shape)
    x = torch.randn(batch, 3, 8, 8, dtype=dtype).contiguous(memory_format=memory_format)
    assert_near(step(other.to(dtype), x), step(plain, x.double()), NEAR[dtype])


def load(network: Mixer, *names: str) -> None:
    """Load the permutations of these names from a network of another seed."""
    again, _ = make_networks(EACH, permutation_seed=1)
    loaded = {key: value for key, value in again.state_dict().items() if any(name in key for name in names)}
    network.load_state_dict(loaded, strict=False)


def move(network: Mixer) -> None:
    """Put weights and indices into memory with gaps."""
    for part in network.blocks.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(torch.stack([parameter, parameter + 1], -1)[..., 0]))
        if isinstance(part, permutation.Permute):
            part.index = torch.stack([part.index, part.index + 1], 1)[:, 0].long()


def set_epsilons(network: Mixer) -> None:
    first, second = network.blocks
    for part, eps in ((first.norm1, 0.1), (first.norm2, 1.5), (second.norm1, 5.0), (second.norm2, 0.7)):
        part.eps = eps
    first.skip = make_networks("projection", project_tokens=16)[0].blocks[0].skip.to(first.norm1.weight)
    first.skip.norm.eps = 0.4


def exchange(network: Mixer) -> None:
    """Put other layers into a block."""
    other = make_networks("tanh", drop_path=0.0)[0].to(network.head.weight).blocks[0]
    network.blocks[0].mlp_tokens, network.blocks[1].mlp_channels.act = other.mlp_tokens, nn.GELU(approximate="tanh")


def infer(network: Mixer) -> None:
    with torch.inference_mode():
        network(torch.randn(4, 3, 8, 8, dtype=network.head.weight.dtype))


def refuse_sizes(network: Mixer) -> None:
    for size in ((8, 6), (17, 6), (16, 12), (6, 16)) if network.blocks[0].batch_last else ():
        with pytest.raises(ValueError, match=rf"\[B, {size[0]}, {size[1]}\] for a block of \[B, 16, 6\]"):
            network.blocks[0](torch.randn(2, *size, dtype=network.head.weight.dtype))


CHANGES = {
    "permutations of another seed are loaded": lambda network: load(network, ""),
    "a permutation before is loaded": lambda network: load(network, "mlp_channels.permute_in"),
    "a permutation between is loaded": lambda network: load(network, "mlp_channels.permute_hidden"),
    "a permutation after is loaded": lambda network: load(network, "mlp_channels.permute_out"),
    "weights and indices have gaps": move,
    "each norm has an epsilon of its own": set_epsilons,
    "layers are exchanged": exchange,
    "inference": infer,
    "features of another size are refused": refuse_sizes,
    "checkpointing": lambda network: network.set_grad_checkpointing(True),
}


@pytest.mark.parametrize("dtype", [FP64, FP32], ids=str)
@pytest.mark.parametrize("shape", ["mixer", EACH])
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_after_a_change_is_that_of_plain_blocks(change, shape, dtype):
    plain, other = make_networks(shape)
    x = torch.randn(4, 3, 8, 8, dtype=dtype)
    step(other.to(dtype), x)  # what is kept of the permutations is of those before
    for network in (plain, other):
        CHANGES[change](network)
    assert_near(step(other, x), step(plain, x.double()), NEAR[dtype])
    features = (each.forward_intermediates(x.to(each.head.weight))[1] for each in (other, plain))
    for found, expected in zip(*features, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("dtype", "strides"), [(FP32, (96, 6, 1)), (FP64, (1, 30, 5))])
def test_fsdp_has_no_view_to_warn_of(dtype, strides):
    """Hooks of a block itself, as FSDP2 has them, leave it with the batch last."""
    _, other = make_networks(EACH, dtype)
    x, called = torch.randn(5, 16, 6, dtype=dtype, requires_grad=True), []
    other.blocks[0].register_forward_hook(lambda *_: called.append(1))
    y = other.blocks[0](x)
    assert (y._is_view(), called) == (False, [1])
    assert y.stride() == arrange(other.blocks[1], x).stride() == strides


def test_kernels_are_given_matrices_row_by_row(monkeypatch):
    """Triton's read memory as if they lay so; gradients of a sum are one number, expanded."""
    called = []

    def checked(name):
        def function(*arguments):
            tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
            assert all(each.is_contiguous() for each in tensors), name
            called.append(name)
            return getattr(by_torch, name)(*arguments)

        return function

    names = ("norm", "norm_backward", "activate", "activate_backward", "add", "add_backward")
    backend = SimpleNamespace(takes=lambda *_: True, **{name: checked(name) for name in names})
    monkeypatch.setitem(operations.BACKENDS, "cpu", lambda: backend)
    x, skip = (torch.randn(5, 6).t().requires_grad_() for _ in range(2))
    weight, bias = (torch.randn(6)[::2].requires_grad_() for _ in range(2))
    normed, same = norm(x, weight, bias, 1e-6)
    (normed.sum() + same.sum()).backward()
    activate(x, torch.randn(12)[::2].requires_grad_()).sum().backward()
    add(skip, x, bias, torch.randperm(6).int()).sum().backward()
    assert called == [*names]


@pytest.mark.parametrize(
    "asks", ["torch.compiler.is_compiling", "torch.jit.is_tracing", "torch._C._are_functorch_transforms_active"]
)
def test_who_follows_operators_sees_the_blocks_as_written(asks, system):
    _, other = make_networks("mixer", FP32)
    x = torch.randn(5, 16, 6)
    assert not needs_eager_ops(other.blocks[0], x)
    system({asks: lambda: True})
    assert needs_eager_ops(other.blocks[0], x)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_on_layers_are_called(kind):
    _, other = make_networks(EACH, FP32)
    called = []
    for block, name in zip(other.blocks, ["mlp_channels.fc1", "norm1"], strict=True):
        getattr(block.get_submodule(name), f"register_{kind}")(lambda part, *_: called.append(part))
    step(other, torch.randn(5, 3, 8, 8))
    assert len(called) == 2


def test_functional_transforms_and_tensors_without_numbers_see_blocks_as_written():
    x, found = torch.randn(5, 3, 8, 8, dtype=FP64), []
    for network in (both := make_networks(EACH)):

        def loss(weights, image, network=network):
            return functional_call(network, weights, (image[None],)).square().sum()

        weights = {name: weight.detach() for name, weight in network.named_parameters()}
        found.append([*vmap(grad(loss), (None, 0))(weights, x).values()])
    assert_near(*found, 1e-12)
    other = both[1].float()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert other(torch.randn(5, 3, 8, 8)).shape == (5, 3)
    assert other.to("meta")(torch.randn(5, 3, 8, 8, device="meta")).shape == (5, 3)


def test_bf16_is_as_near_to_fp64_as_plain_blocks_bf16():
    plain, other = make_networks(EACH)
    x = torch.randn(64, 3, 8, 8)
    exact, apart = step(plain, x.double()), []
    for network in (plain, other):
        with torch.autocast("cpu", BF16):
            apart.append(distance(step(network.float(), x), exact))
    assert apart[1] < 1.2 * apart[0]


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 12), (5, 7), (1, 9), (7, 1)])
def test_a_product_by_aligned_copies_is_that_of_the_matrix(outputs, inputs):
    weight, x = torch.randn(outputs, inputs).double(), torch.randn(inputs, 30).double()
    g = torch.randn(outputs, 30).double()
    results = []
    for multiply in (operations.product_by_aligned_copies, torch.matmul):
        own = [weight.clone().requires_grad_(), x.clone().requires_grad_()]
        y = multiply(*own)
        y.backward(g)
        results.append([y.detach(), *(each.grad for each in own)])
    assert_near(*results, 1e-14)
    for each in (operations.aligned(weight), operations.aligned(weight.t())):
        assert each.stride()[0] % 8 == 0


@pytest.mark.parametrize(("dtype", "inputs", "copied"), [(BF16, 12, True), (BF16, 16, False), (FP32, 12, False)])
def test_gpus_multiply_by_aligned_copies_in_16_bits(dtype, inputs, copied):
    with FakeTensorMode():
        weight = torch.empty(6, inputs, dtype=dtype, device="cuda", requires_grad=True)
        y = operations.product(weight, torch.empty(inputs, 8, dtype=dtype, device="cuda"), dtype)
        assert (y.grad_fn.name() == "_ProductBackward") == copied
        assert y.shape == (6, 8)


def test_places_are_on_the_device_of_the_features():
    _, other = make_networks("mixer")
    other(torch.randn(4, 3, 8, 8).double())  # by rows, whose places are kept
    assert places_of(other.blocks[0].mlp_channels, torch.empty(96, 4, device="meta"), 6).inward.is_meta


def test_blocks_of_other_layers_do_not_fit():
    grouped = make_mixer(**SHAPES["mixer"], token_groups=2)
    assert not any(block.fits_batch_last() for block in grouped.blocks)
    _, other = make_networks("mixer", depth=6)
    other.blocks[0].norm1 = nn.LayerNorm(6, elementwise_affine=False)
    other.blocks[2].mlp_channels.fc2 = nn.Linear(6, 6, bias=False)
    other.blocks[3].norm2 = nn.Softmax(-1)  # without a weight
    other.blocks[4].mlp_tokens.permute_in = nn.Sequential(other.blocks[4].mlp_tokens.permute_in, nn.ChannelShuffle(2))
    other.blocks[5].skip = nn.ReLU()
    assert [block.fits_batch_last() for block in other.blocks] == [False, True, False, False, False, False]


# By compiled code alone.


@pytest.fixture
def use_library(monkeypatch):
    """use_library(open): compute with what `open` opens in the place of this machine's library."""

    def use(open_library) -> None:
        monkeypatch.setattr(by_c, "open_library", open_library)
        by_c.load_library.cache_clear()

    yield use
    by_c.load_library.cache_clear()


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64's instructions")
@pytest.mark.parametrize("machine", MACHINES)
def test_a_step_is_the_same_on_other_machines(machine, use_library, tmp_path):
    library = tmp_path / "block.so"
    sources = ["-shared", "-fPIC", "-Wno-psabi", "-o", library, SOURCES / "mixer_block.c", "-lm"]
    subprocess.run(["cc", *FLAGS, *MACHINES[machine], *sources], check=True)
    use_library(lambda: ctypes.CDLL(str(library)))
    for shape in SHAPES:
        for size in ((7, 33), (50, 24)):
            block, x = make_block(*size, shape), torch.randn(21, *size)
            assert_near(step(block, x), exact_step(block, x))


def test_what_the_compiled_code_lacks_is_left_to_pytorch(use_library):
    block, x = make_block(7, 33, "mixer"), torch.randn(5, 7, 33)
    expected = exact_step(block, x)
    assert not any(by_c.takes(block, x.to(other)) for other in (torch.half, torch.double, "meta"))

    def fail():
        raise BuildError("there is no C compiler")

    other = make_block(7, 33, "mixer")
    other.mlp_tokens.act = nn.Identity()
    assert by_c.takes(block, x)
    assert not by_c.takes(other, x)
    assert_near(step(other, x), exact_step(other, x))
    use_library(fail)
    assert not by_c.takes(block, x)
    assert_near(step(block, x), expected)


@pytest.mark.parametrize("shape", ["rp s_mixer", EACH, "mixer projection"])
@pytest.mark.parametrize("batch", [100, 300])
def test_the_bits_do_not_depend_on_the_threads(shape, batch):
    block, x = make_block(20, 32, shape), torch.randn(batch, 20, 32)
    results = []
    for threads in (1, 2, 3, 7, 1):
        torch.set_num_threads(threads)  # which tests/conftest.py sets back
        results.append(step(block, x))
    assert all(all(map(torch.equal, each, results[0])) for each in results)


def test_sums_over_many_images_are_near():
    block, x = make_block(12, 20, EACH), torch.randn(3000, 12, 20)
    assert_near(step(block, x), exact_step(block, x))


def test_bf16_features_are_rounded_once():
    block, x = make_block(7, 18, "skips"), torch.randn(21, 7, 18).bfloat16()
    y, dx, *gradients = step(block, x)
    expected_y, expected_dx, *expected = step(block, x.float())
    assert y.dtype == dx.dtype == BF16
    assert torch.equal(y, expected_y.bfloat16())
    assert_near([dx, *gradients], [each.double() for each in (expected_dx, *expected)], 2e-2)  # as g is rounded too


def lone_activation(activation, channels=1):
    """A block that is gelu(norm(x)): no skip, and a second mixing that gives zeros."""
    norm = "none" if channels == 1 else "layer"
    block = make_block(1, channels, "s_mixer", project_tokens=1, norm=norm, activation=activation)
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
    large = torch.tensor([3e38, -3e38])[:, None, None]
    assert lone_activation(activation)(large).flatten().tolist() == [float(large[0]), 0.0]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="they are zeros on x86 alone")
@pytest.mark.parametrize("flushes", [False, True])
def test_subnormal_numbers_are_zero_there_and_nowhere_else(flushes):
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


def test_a_nan_stays_with_its_image():
    block, x = make_block(7, 33, "rp s_mixer"), torch.randn(21, 7, 33)
    x[10, 3, 5] = torch.nan
    y = block(x)
    assert y[10].isnan().any()
    assert y[torch.arange(21) != 10].isfinite().all()
    y.sum().backward()
    assert block.mlp_tokens.fc.weight.grad.isnan().all()


@pytest.mark.parametrize("wrong", [-1, 231, 2**31 - 1, None])
@pytest.mark.parametrize(
    "name", ["mlp_tokens.permute_in", "mlp_tokens.permute_out", "mlp_channels.permute_hidden", "skip", "channel_skip"]
)
def test_an_index_that_is_no_permutation_is_refused(name, wrong):
    """A number out of range, of whose change PyTorch knows nothing; or one that is there twice."""
    block, x = make_block(7, 33, EACH), torch.randn(5, 7, 33)
    block(x)
    index = block.get_submodule(name).index
    if wrong is None:
        index[3] = index[4]
    else:
        index.numpy()[5] = wrong
    error, words = (ValueError, "index is not a permutation") if wrong is None else (IndexError, "index out of range")
    with pytest.raises(error, match=words):
        block(x)


def test_permutations_of_another_size_are_refused():
    block = make_block(7, 33, "skips")
    block.skip = make_block(7, 34, "skips").skip
    with pytest.raises(ValueError, match="a permutation of another size"):
        block(torch.randn(5, 7, 33))


def test_frozen_weights_and_inputs_without_gradients():
    block, x = make_block(7, 33, "mixer"), torch.randn(5, 7, 33)
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


@pytest.mark.parametrize("default", [FP64, BF16])
def test_the_default_dtype_is_not_that_of_sums(default):
    block, x = make_block(7, 33, EACH), torch.randn(21, 7, 33)
    expected = step(block, x)
    g = torch.randn(expected[0].shape, generator=torch.Generator().manual_seed(2))
    torch.set_default_dtype(default)
    try:
        x = x.clone().requires_grad_()
        block.zero_grad()
        y = block(x)
        y.backward(g)
    finally:
        torch.set_default_dtype(FP32)
    assert all(map(torch.equal, [y, x.grad, *(parameter.grad for parameter in block.parameters())], expected))
