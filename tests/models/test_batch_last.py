"""Blocks computed with the batch last in memory, against the blocks as they are written."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap

from widemix.models import permutation
from widemix.models.batch_last import by_torch, operations
from widemix.models.batch_last.block import arrange, needs_eager_ops, places_of
from widemix.models.batch_last.operations import activate, add, norm
from widemix.models.mixer.network import Mixer

MLP = {"channels": 6, "depth": 2, "token_hidden": 7, "channel_hidden": 9}
S_MIXER = {"channels": 6, "depth": 3, "token_hidden": None, "channel_hidden": None}
SHAPES = {
    "normal": MLP,
    "rp": MLP | {"permutation": "random"},
    "each layer and skip": MLP | {"permutation": "random", "permuted_layers": "each", "permuted_skips": True},
    "one block": MLP | {"permutation": "random", "permuted_mixings": "token", "permuted_blocks": [1]},
    "s_mixer": S_MIXER | {"tokens": 10},
    "rp s_mixer": S_MIXER | {"permutation": "random", "tokens": 10},
    "no norm": MLP | {"tokens": 20, "norm": "none", "activation": "square", "permutation": "random"},
    "tanh": MLP | {"activation": "gelu_tanh", "drop_path_rate": 0.4},
    "low rank": MLP | {"token_weights": "low_rank", "rank": 2, "channel_weights": "block_diagonal", "blocks": 3},
    "kronecker": S_MIXER | {"permutation": "random", "tokens": 10, "token_weights": "kronecker"},
    "btt": S_MIXER | {"tokens": 10, "token_weights": "monarch", "channel_weights": "btt", "rank": 2},
}
BATCHES = [0, 1, 5, 64]


def both_ways(shape: dict, dtype: torch.dtype) -> tuple[Mixer, Mixer]:
    """A network with random weights everywhere, and its copy that computes with the batch last."""
    torch.manual_seed(0)
    plain = Mixer(img_size=8, patch_size=2, num_classes=3, **shape).to(dtype).train()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.3)
    other = copy.deepcopy(plain)
    for block in other.blocks:
        assert block.fits_batch_last()
        block.batch_last = True
    return plain, other


def step(network: Mixer, x: torch.Tensor) -> list[torch.Tensor]:
    """Logits and all gradients, by the same drop path."""
    x = x.clone().requires_grad_()
    network.zero_grad()
    torch.manual_seed(1)
    logits = network(x)
    logits.square().sum().backward()
    return [logits.detach(), x.grad, *(parameter.grad for parameter in network.parameters())]


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    largest = max(
        float(tensor.abs().max()) for tensor in expected if tensor.numel()
    )  # some gradients are zero but for rounding
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance * largest)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_step_is_that_of_the_plain_blocks(shape, batch):
    plain, other = both_ways(shape, torch.float64)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(batch, 3, 8, 8, dtype=torch.float64).contiguous(memory_format=memory_format)
        assert_near(step(other, x), step(plain, x), 1e-12)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_step_in_fp32_is_that_in_fp64(shape):
    """By the compiled code."""
    plain, other = both_ways(shape, torch.float64)
    x = torch.randn(33, 3, 8, 8)
    assert_near(step(other.float(), x), step(plain, x.double()), 2e-5)


@pytest.mark.parametrize(("dtype", "strides"), [(torch.float32, (96, 6, 1)), (torch.float64, (1, 30, 5))])
def test_fsdp_has_no_view_to_warn_of(dtype, strides):
    _, other = both_ways(SHAPES["rp"], dtype)
    x = torch.randn(5, 16, 6, dtype=dtype, requires_grad=True)
    y = other.blocks[0](x)
    assert y._base is None
    assert y.stride() == arrange(other.blocks[1], x).stride() == strides


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_norm_keeps_its_own_epsilon(dtype):
    """By rows and by the compiled code; the norm of a projected skip has one too."""
    plain, other = both_ways(SHAPES["s_mixer"], torch.float64)
    for network in (plain, other):
        first, second, *_ = network.blocks
        for part, eps in ((first.norm1, 0.1), (first.skip.norm, 0.4), (first.norm2, 1.5), (second.norm1, 5.0)):
            part.eps = eps
    x = torch.randn(5, 3, 8, 8)
    assert_near(
        step(other.to(dtype), x.to(dtype)), step(plain, x.double()), 1e-12 if dtype == torch.float64 else 2e-5
    )


def test_hooks_of_the_block_itself_leave_it_with_the_batch_last():
    _, other = both_ways(SHAPES["normal"], torch.float64)
    called = []
    other.blocks[0].register_forward_hook(lambda *_: called.append(1))
    y = other.blocks[0](torch.randn(5, 16, 6, dtype=torch.float64))
    assert y.stride() == (1, 30, 5)
    assert called == [1]


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
    _, other = both_ways(SHAPES["normal"], torch.float32)
    x = torch.randn(5, 16, 6)
    assert not needs_eager_ops(other.blocks[0], x)
    system({asks: lambda: True})
    assert needs_eager_ops(other.blocks[0], x)


def test_bf16_is_as_near_to_fp64_as_the_plain_blocks_bf16():
    plain, other = both_ways(SHAPES["rp"], torch.float64)
    x = torch.randn(64, 3, 8, 8)
    exact = step(plain, x.double())
    apart = []
    for network in (plain, other):
        with torch.autocast("cpu", torch.bfloat16):
            found = step(network.float(), x)
        apart.append(sum(float((a - b).norm() ** 2) for a, b in zip(found, exact, strict=True)) ** 0.5)
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
        results.append((y.detach(), *(each.grad for each in own)))
    assert_near(*results, 1e-14)
    for each in (operations.aligned(weight), operations.aligned(weight.t())):
        assert each.stride()[0] % 8 == 0


def test_gpus_multiply_by_aligned_copies_in_16_bits():
    with FakeTensorMode():
        for dtype, inputs, copied in (
            (torch.bfloat16, 12, True),
            (torch.bfloat16, 16, False),
            (torch.float32, 12, False),
        ):
            weight = torch.empty(6, inputs, dtype=dtype, device="cuda", requires_grad=True)
            y = operations.product(weight, torch.empty(inputs, 8, dtype=dtype, device="cuda"), dtype)
            assert (y.grad_fn.name() == "_ProductBackward") == copied
            assert y.shape == (6, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_that_is_not_one_stays_so(dtype):
    x = torch.tensor([[1.0, torch.nan], [2.0, 3.0]], dtype=dtype)
    one = torch.ones(2)
    for found in (norm(x, one, one, 1e-6)[0], activate(x, one), add(x, x, one)):
        assert found.isnan()[:, 1].any()
        assert not found.isnan()[:, 0].any()


@pytest.mark.parametrize(
    "name", ["", "mlp_channels.permute_in", "mlp_channels.permute_hidden", "mlp_channels.permute_out"]
)
def test_the_order_of_the_rows_follows_loaded_permutations(name):
    """Of all of them at once, or of one by itself."""
    plain, other = both_ways(SHAPES["each layer and skip"], torch.float64)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    step(other, x)
    again, _ = both_ways(SHAPES["each layer and skip"] | {"permutation_seed": 1}, torch.float64)
    loaded = {key: value for key, value in again.state_dict().items() if name in key}
    assert len(loaded) == len(plain.blocks) or not name
    for network in (plain, other):
        network.load_state_dict(loaded, strict=not name)
    assert_near(step(other, x), step(plain, x), 1e-12)


@pytest.mark.parametrize("shape", [SHAPES["normal"], SHAPES["each layer and skip"]], ids=["normal", "rp"])
def test_weights_and_indices_may_lie_in_memory_in_any_way(shape):
    plain, other = both_ways(shape, torch.float32)
    for network in (plain, other):
        for part in network.blocks.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                setattr(part, name, nn.Parameter(torch.stack([parameter, parameter + 1], -1)[..., 0]))
            if isinstance(part, permutation.Permute):
                part.index = torch.stack([part.index, part.index + 1], 1)[:, 0].long()
    x = torch.randn(5, 3, 8, 8)
    assert_near(step(other, x), step(plain, x), 2e-5)


@pytest.mark.parametrize("shape", [SHAPES["normal"], SHAPES["rp"]], ids=["normal", "rp"])
def test_training_may_follow_inference(shape):
    plain, other = both_ways(shape, torch.float64)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    with torch.inference_mode():
        assert torch.allclose(other(x), plain(x))
    assert_near(step(other, x), step(plain, x), 1e-12)


def test_places_are_on_the_device_of_the_features():
    _, other = both_ways(SHAPES["normal"], torch.float32)
    other(torch.randn(4, 3, 8, 8))
    assert places_of(other.blocks[0].mlp_channels, torch.empty(96, 4, device="meta"), 6).inward.is_meta


@pytest.mark.parametrize("name", ["mlp_tokens.permute_in", "mlp_channels.permute_hidden", "channel_skip"])
def test_a_loaded_index_that_is_no_permutation_is_refused(name):
    _, other = both_ways(SHAPES["each layer and skip"], torch.float32)
    other(torch.randn(2, 3, 8, 8))
    index = other.blocks[0].get_submodule(name).index
    index[3] = index[4]
    with pytest.raises(ValueError, match="index is not a permutation"):
        other(torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("size", [(8, 6), (17, 6), (16, 12), (6, 16)])
@pytest.mark.parametrize("shape", [SHAPES["normal"], SHAPES["rp"]], ids=["normal", "rp"])
def test_features_of_another_size_are_refused_and_change_nothing(shape, size):
    plain, other = both_ways(shape, torch.float64)
    with pytest.raises(ValueError, match=rf"\[B, {size[0]}, {size[1]}\] for a block of \[B, 16, 6\]"):
        other.blocks[0](torch.randn(2, *size, dtype=torch.float64))
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    assert_near(step(other, x), step(plain, x), 1e-12)


def test_features_and_checkpointing_see_the_same_shapes():
    plain, other = both_ways(SHAPES["rp"], torch.float64)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    other.set_grad_checkpointing(True)
    assert_near(step(other, x), step(plain, x), 1e-12)
    for found, expected in zip(*(each.forward_intermediates(x)[1] for each in (other, plain)), strict=True):
        assert torch.allclose(found, expected)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_on_layers_are_called(kind):
    _, other = both_ways(SHAPES["rp"], torch.float32)
    called = []
    for block, name in zip(other.blocks, ["mlp_channels.fc1", "norm1"], strict=True):
        getattr(block.get_submodule(name), f"register_{kind}")(lambda part, *_: called.append(part))
    step(other, torch.randn(5, 3, 8, 8))
    assert len(called) == 2


def test_tensors_without_numbers_see_the_blocks_as_they_are_written():
    _, other = both_ways(SHAPES["rp"], torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert other(torch.randn(5, 3, 8, 8)).shape == (5, 3)
    assert other.to("meta")(torch.randn(5, 3, 8, 8, device="meta")).shape == (5, 3)


def test_functional_transforms_see_the_blocks_as_they_are_written():
    x, found = torch.randn(5, 3, 8, 8, dtype=torch.float64), []
    for network in both_ways(SHAPES["rp"], torch.float64):

        def loss(weights, image, network=network):
            return functional_call(network, weights, (image[None],)).square().sum()

        weights = {name: weight.detach() for name, weight in network.named_parameters()}
        found.append([*vmap(grad(loss), (None, 0))(weights, x).values()])
    assert_near(*found, 1e-12)


def test_what_it_does_not_compute():
    grouped = Mixer(img_size=8, patch_size=2, num_classes=3, **MLP, token_groups=2)
    assert not any(block.fits_batch_last() for block in grouped.blocks)
    other = Mixer(img_size=8, patch_size=2, num_classes=3, **(MLP | {"depth": 6}))
    other.blocks[0].norm1 = nn.LayerNorm(6, elementwise_affine=False)
    other.blocks[2].mlp_channels.fc2 = nn.Linear(9, 6, bias=False)
    other.blocks[3].norm2 = nn.Softmax(-1)  # without a weight
    other.blocks[4].mlp_tokens.permute_in = nn.Sequential(other.blocks[4].mlp_tokens.permute_in, nn.ChannelShuffle(2))
    other.blocks[5].skip = nn.ReLU()
    assert [block.fits_batch_last() for block in other.blocks] == [False, True, False, False, False, False]
