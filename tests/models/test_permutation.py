"""Permutations against explicit matrices, and the compiled code that permutes columns against PyTorch's indexing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from widemix.models import permutation
from widemix.models.permutation import Permute, inverse, reorder_columns

OURS, TORCHS = "widemix.reorder_columns.default", "aten.index_select.default"
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int16]


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@given(st.integers(0, 20), st.integers(1, 40), st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_columns_are_those_of_indexing_bit_for_bit(rows, size, dtype, seed):
    index = permutation.random(size, seed)
    bits = torch.randint(-(2**31), 2**31 - 1, (rows, size, 1), generator=torch.Generator().manual_seed(seed))
    x = bits.to(torch.int32).view(dtype)[..., 0]  # also NaN, infinities and subnormal numbers; rows with gaps
    with Operators() as seen:
        moved, back = reorder_columns(x, index), reorder_columns(x, index, back=True)
    assert OURS in seen.names
    assert TORCHS not in seen.names
    number = torch.int16 if x.element_size() == 2 else torch.int32
    assert torch.equal(moved.view(number), x.contiguous().view(number)[:, index.long()])
    assert torch.equal(back.view(number), x.contiguous().view(number)[:, inverse(index).long()])


@pytest.mark.parametrize("back", [False, True])
def test_columns_beyond_the_cache_are_those_of_indexing(back):
    index = permutation.random(50_001, 0)
    x = torch.randn(13, 50_001).bfloat16()
    assert torch.equal(reorder_columns(x, index, back), x[:, (inverse(index) if back else index).long()])


@pytest.mark.parametrize("wrong", [-1, 5, 2**31 - 1])
@pytest.mark.parametrize("back", [False, True])
def test_an_index_out_of_range_is_an_error(wrong, back):
    index = permutation.identity(5)
    index[3] = wrong
    with pytest.raises(IndexError, match="out of range of 5 columns"):
        reorder_columns(torch.zeros(6, 5), index, back)
    with pytest.raises(IndexError, match="4 indices of 5 columns"):
        reorder_columns(torch.zeros(6, 5), permutation.identity(4), back)


def test_pytorch_does_what_the_compiled_code_does_not():
    index = permutation.random(6, 0)
    with Operators() as seen:
        reorder_columns(torch.zeros(2, 6, dtype=torch.float64), index)
        reorder_columns(torch.zeros(2, 6), index.long())
        torch.set_num_threads(2)
        reorder_columns(torch.zeros(2, 6), index)
        reorder_columns(torch.zeros(2, 6, device="meta"), index.to("meta"))
    with FakeTensorMode(), Operators() as fakes:
        reorder_columns(torch.zeros(2, 6), torch.zeros(6, dtype=torch.int32))
    assert OURS not in seen.names + fakes.names
    assert seen.names.count(TORCHS) == 4
    assert TORCHS in fakes.names


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_traced_graphs_have_the_permutation_and_not_its_result():
    module = Permute(permutation.random(12, 3), columns=4)
    x, other = torch.randn(2, 5, 2, 6)
    traced = torch.jit.trace(module, x)
    graph = make_fx(module)(x)
    exported = torch.export.export(module, (x,))
    for function in (traced, graph, exported.module()):
        assert torch.equal(function(other), module(other))
    assert any(str(node.target) == TORCHS for node in exported.graph.nodes)


def test_vmap_over_indices_gives_each_its_own():
    indices = torch.stack([permutation.random(12, seed) for seed in range(3)])
    x = torch.randn(3, 5, 2, 6)

    def permuted(index, x):
        return torch.func.functional_call(Permute(index, columns=4), {"index": index}, (x,))

    each = [Permute(index, columns=4)(one) for index, one in zip(indices, x, strict=True)]
    assert torch.equal(torch.vmap(permuted)(indices, x), torch.stack(each))
    alike = [Permute(index, columns=4)(x[0]) for index in indices]
    assert torch.equal(torch.vmap(permuted, in_dims=(0, None))(indices, x[0]), torch.stack(alike))
    inner = torch.vmap(Permute(indices[0], columns=4), in_dims=1, out_dims=1)(x)
    assert torch.equal(inner, torch.stack([Permute(indices[0], columns=4)(x[:, i]) for i in range(5)], 1))


def test_a_batch_of_gradients_is_each_of_them():
    module = Permute(permutation.random(12, 3), columns=4)
    x, weights = torch.randn(5, 2, 6, requires_grad=True), torch.randn(7, 5, 3, 4)
    output = module(x)
    each = [torch.autograd.grad(output, x, one, retain_graph=True)[0] for one in weights]
    found = torch.autograd.grad(output, x, weights, is_grads_batched=True)[0]
    assert torch.equal(found, torch.stack(each))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_those_of_indexing(dtype):
    index = permutation.random(12, 3)
    x = torch.randn(5, 2, 6, dtype=dtype, requires_grad=True)
    weights = torch.randn(5, 3, 4, dtype=dtype)
    outputs = Permute(index, columns=4)(x), x.flatten(1)[:, index.long()].unflatten(1, (3, 4))
    losses = [(output * weights).square().sum() for output in outputs]
    found, expected = (torch.autograd.grad(loss, x, create_graph=True)[0] for loss in losses)
    assert torch.equal(found, expected)
    twice = (torch.autograd.grad(gradient.square().sum(), x)[0] for gradient in (found, expected))
    assert torch.equal(*twice)


sizes = st.integers(1, 9)
seeds = st.integers(0, 2**63)


def dense(index):
    return torch.eye(len(index), dtype=torch.float64)[index.long()]


@given(sizes, sizes)
def test_commutation_takes_a_matrix_to_its_transpose(rows, columns):
    x = torch.arange(rows * columns).view(rows, columns)
    assert torch.equal(x.flatten()[permutation.commutation(rows, columns)], x.T.flatten())


@given(sizes, seeds, seeds)
def test_inverse_and_product_are_those_of_the_matrices(size, one, other):
    a, b = permutation.random(size, one), permutation.random(size, other)
    assert torch.equal(dense(inverse(a)), dense(a).T)
    assert torch.equal(dense(permutation.compose(a, b)), dense(a) @ dense(b))
    assert torch.equal(permutation.compose(a, inverse(a)), permutation.identity(size))


def test_random_is_a_function_of_its_key_and_nearly_uniform():
    assert torch.equal(permutation.random(50, (1, 2)), permutation.random(50, (1, 2)))
    assert not torch.equal(permutation.random(50, (1, 2)), permutation.random(50, (2, 1)))
    counts = torch.zeros(4, 4)
    for seed in range(2000):
        counts[torch.arange(4), permutation.random(4, seed).long()] += 1
    assert (counts / 2000 - 0.25).abs().max() < 0.04  # four standard deviations
