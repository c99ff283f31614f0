"""Separation ranks against sympy's coefficients over the rationals, and against counts that need no computer."""

import itertools
import json

import numpy as np
import pytest
import sympy
import torch
from sympy.polys.matrices import DomainMatrix

from widemix.analysis.separation_rank import (
    PRIME,
    attention_layers,
    mixer_layers,
    monomials,
    rank,
    separation_ranks,
)
from widemix.recipe import load_recipe

KEYS = {
    "kind": "s_mixer",
    "expansion": "null",
    "norm": "none",
    "project_tokens": "2",
    "channels": "2",
    "depth": "2",
}


def mixer(residuals=False, seed=0, **keys):
    overrides = [(f"model.{name}", str(value)) for name, value in {**KEYS, **keys}.items()]
    return mixer_layers(load_recipe("svhn/mixer_square", overrides), residuals, seed)


def greatest(ranks):
    return [each.greatest for each in ranks]


def symbolic_ranks(depth, residuals):
    """Ranks of the matrix of coefficients of the 2 x 2 Mixer of equation 2, with weights of small whole numbers."""
    random = np.random.default_rng(0)
    names = a, b = sympy.symbols("a:2"), sympy.symbols("b:2")
    x, found = sympy.Matrix(names), []
    for layer in range(depth):
        weight = sympy.Matrix(random.integers(1, 20, (2, 2)).tolist())
        product = weight * x if layer % 2 == 0 else x * weight
        x = (product.applyfunc(lambda entry: entry**2) + (x if residuals else sympy.zeros(2, 2))).expand()
        terms = sympy.Poly(x[0, 0], *a, *b).as_dict()
        rows, columns = (sorted({power[at] for power in terms}) for at in (slice(2), slice(2, 4)))
        matrix = [[int(terms.get((*row, *column), 0)) for column in columns] for row in rows]
        found.append(DomainMatrix.from_list(matrix, sympy.QQ).rank())
    return found


@pytest.mark.parametrize("residuals", [False, True])
def test_two_tokens_have_the_ranks_of_their_coefficients(residuals):
    assert symbolic_ranks(2 if residuals else 3, residuals) == [3, 9, 25][: 2 if residuals else 3]
    layers, size = mixer(residuals)
    assert greatest(separation_ranks(layers, size, 2))[:3] == [3, 9, 25]


def test_attention_of_two_tokens_has_3_15_and_105():
    """Cubic terms that are odd in each output's token: half of what their degree allows."""
    found = separation_ranks(attention_layers(3, 2, heads=1, seed=0), (2, 2), 3)
    assert greatest(found) == [3, 15, 105]
    assert [each.monomials for each in found] == [6, 30, 210]


def test_halves_of_the_channels_meet_in_the_second_layer():
    layers, size = mixer()
    assert greatest(separation_ranks(layers, size, 2, "channels")) == [1, 3, 9, 25]


@pytest.mark.parametrize(("partition", "halves"), [("tokens", (1 * 5, 2 * 5)), ("channels", (3 * 2, 3 * 3))])
def test_of_odd_sizes_the_second_half_is_the_larger(partition, halves):
    [found] = separation_ranks(lambda x: [x], (3, 5), 1, partition)
    assert found.monomials == monomials(1, *halves)
    assert (found.least, found.greatest) == (1, 1)  # each output is an input of one half


def test_points_are_doubled_up_to_the_most():
    layers, size = mixer()
    asked = []

    def watched(x):
        asked.append(x)
        return layers(x)

    assert greatest(separation_ranks(watched, size, 2, most=25, seed=3)) == [3, 9, None]
    assert [len(x) for x in asked] == [16 * 16, 25 * 25]
    for seed, is_same in ((3, True), (4, False)):
        separation_ranks(watched, size, 2, most=16, seed=seed)
        assert torch.equal(asked[0], asked[-1]) is is_same
    x = torch.arange(8).view(2, 2, 2)
    results = [mixer(seed=seed)[0](x) for seed in (0, 0, 1)]
    assert torch.equal(results[0][-1], results[1][-1])
    assert not torch.equal(results[0][-1], results[2][-1])


@pytest.mark.parametrize("tokens", [64, 1024])
def test_large_networks_are_computed_in_parts(tokens):
    """(a + b)^2 = a^2 + 2 a b + b^2 is of rank 3, of sums of so many inputs."""
    asked = []

    def layers(x):
        asked.append(len(x))
        return [(x.sum((1, 2), keepdim=True) % PRIME) ** 2 % PRIME]

    [found] = separation_ranks(layers, (tokens, 64), 2)
    assert found.greatest == 3
    assert asked == ([4 * 16] * 4 if tokens == 64 else [16] * 16)


def test_random_permutations_and_two_layers_a_mixing_are_measured_too():
    for keys in ({"permutation": "random", "permuted_skips": "true"}, {"kind": "mixer", "expansion": 1}):
        layers, size = mixer(residuals=True, **keys)
        found = separation_ranks(layers, size, 2)
        assert all(0 < each.least <= each.greatest <= each.monomials for each in found)


def test_ranks_in_the_field_are_those_over_the_rationals():
    random = np.random.default_rng(1)
    for rows, columns, inner in ((6, 5, 3), (4, 7, 4), (5, 5, 1)):
        matrix = random.integers(-9, 9, (rows, inner)) @ random.integers(-9, 9, (inner, columns))
        assert rank(matrix) == np.linalg.matrix_rank(matrix)
    assert rank(np.zeros((3, 3), np.int64)) == 0
    layers, size = mixer()
    few = separation_ranks(layers, size, 2, most=16)
    assert greatest(few) == [3, 9, None]  # 25 take more points


def test_a_degrees_rank_is_its_monomials_largest_matching():
    """By scipy's matching of the monomials of a with those of b whose product has the degree or less."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_bipartite_matching

    for degree, first, second in ((2, 2, 2), (4, 2, 2), (5, 1, 3), (4, 2, 3)):
        sides = [
            [sum(p) for p in itertools.product(range(degree + 1), repeat=n) if sum(p) <= degree]
            for n in (first, second)
        ]
        fits = csr_array(np.add.outer(*map(np.array, sides)) <= degree)
        assert monomials(degree, first, second) == (maximum_bipartite_matching(fits) >= 0).sum()


def test_the_command_writes_ranks_bounds_and_a_figure(tmp_path, widemix):
    options = [f"--model.{name}={value}" for name, value in {**KEYS, "depth": 1}.items()]
    outputs = ("--to", tmp_path, "--json", tmp_path / "r")
    code, printed = widemix("analyse", "separation-rank", "svhn/mixer_square", *options, *outputs)
    assert code == 0, printed
    assert "Mixer, 2 layers: 9; at most 9 of its degree" in printed
    assert "attention, 2 layers: 15; at most 30 of its degree" in printed
    numbers = json.loads((tmp_path / "r").read_text())
    assert [row["greatest"] for row in numbers["measured"]["Mixer"]] == [3, 9]
    assert 3 ** numbers["bounds_log3"]["Mixers, upper bound (5.5)"][0] == pytest.approx(32**2)
    assert (tmp_path / "separation_rank.png").stat().st_size > 10_000
