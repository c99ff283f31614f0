"""Permutations against explicit matrices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from widemix.models import permutation
from widemix.models.permutation import Permute, inverse

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


def test_permute_has_the_gradient_of_its_matrix():
    index = permutation.random(12, 3)
    module = Permute(index, columns=4)
    x = torch.randn(2, 6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(module(x), (x.flatten(1) @ dense(index).T).view(2, 3, 4))
    assert torch.autograd.gradcheck(module, x)
    assert torch.autograd.gradgradcheck(module, x)


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")  # newer torch's, of torch.jit.script
def test_permute_under_torchscript_and_vmap_is_the_same():
    module = Permute(permutation.random(12, 3), columns=4)
    x = torch.randn(5, 2, 6, 2)
    assert torch.equal(torch.vmap(module)(x), torch.stack([module(one) for one in x]))
    scripted = torch.jit.script(module)
    assert torch.equal(scripted(x[0]), module(x[0]))
