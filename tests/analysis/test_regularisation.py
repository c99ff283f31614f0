"""Proposition 3.3: each minimum against another solver, and the order of the three."""

import json

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.linear_model import Lasso

from widemix.analysis.regularisation import minimise_kronecker, minimise_norm, regression, sweep


@pytest.fixture(scope="module")
def problem():
    return regression(3, 2, 30, noise=0.3, seed=0)


def test_the_teacher_is_a_product_of_sparse_matrices():
    exact, noisy = (regression(3, 2, 500, noise, seed=5) for noise in (0.0, 0.25))
    assert exact.x.shape == exact.y.shape == (500, 6)
    teacher = np.linalg.lstsq(exact.x, exact.y, rcond=None)[0].T
    assert exact.loss(teacher) == pytest.approx(0, abs=1e-20)
    blocks = teacher.reshape(2, 3, 2, 3).transpose(0, 2, 1, 3).reshape(4, 9)  # a row for each entry of V
    assert [(np.abs(blocks) > 1e-9).any(axis).sum() for axis in (1, 0)] == [1, 3]  # a third of 4, and of 9
    assert np.array_equal(noisy.x, exact.x)
    assert (noisy.y - exact.y).std() == pytest.approx(0.25 * exact.y.std(), rel=0.05)
    assert noisy.loss(teacher) == pytest.approx(((noisy.y - exact.y) ** 2).sum() / 1000)
    assert (noisy.tokens, noisy.channels) == (3, 2)


def test_starts_are_those_of_the_seed(problem):
    assert regression(1, 1, 4, 0.0, seed=0).y.all()
    found = {seed: [each["mixer"] for each in sweep(problem, np.array([0.1, 0.2]), seed)] for seed in (0, 7)}
    assert found[7] == [minimise_kronecker(problem, decay, 7)[0] for decay in (0.1, 0.2)]
    assert found[7] != found[0]  # their last digits


def test_the_kronecker_side_is_that_of_a_general_minimiser(problem):
    def value(weights):
        v, w = weights[:4].reshape(2, 2), weights[4:].reshape(3, 3)
        return problem.loss(np.kron(v, w)) + 0.1 / 2 * (weights**2).sum()

    random = np.random.default_rng(1)
    others = [minimize(value, random.normal(size=13), tol=1e-12).fun for _ in range(6)]
    found, matrix = minimise_kronecker(problem, 0.1)
    assert found == pytest.approx(min(others), rel=1e-6)
    # lemma B.1: it is the loss with the Frobenius norm of the product
    assert found == pytest.approx(problem.loss(matrix) + 0.1 * np.linalg.norm(matrix), rel=1e-6)


def test_the_l1_side_is_scikit_learns_lasso(problem):
    found, b = minimise_norm(problem, 0.05, "l1")
    rows = [Lasso(alpha=0.05, fit_intercept=False, tol=1e-10).fit(problem.x, y).coef_ for y in problem.y.T]
    np.testing.assert_allclose(b, np.stack(rows), atol=1e-4)
    assert found == pytest.approx(problem.loss(np.stack(rows)) + 0.05 * np.abs(rows).sum())
    found, b = minimise_norm(problem, 0.05, "frobenius")

    def value(weights):
        return problem.loss(weights.reshape(6, 6)) + 0.05 * np.linalg.norm(weights)

    assert found == pytest.approx(minimize(value, np.ones(36), tol=1e-10).fun, rel=1e-6)


def test_the_bound_holds_and_all_agree_where_the_penalty_wins(problem):
    entries = sweep(problem, np.geomspace(1e-3, 100, 5))
    first = entries[0]
    found = {
        "mixer": minimise_kronecker(problem, 1e-3)[1],
        "frobenius": minimise_norm(problem, 1e-3, "frobenius")[1],
        "l1": minimise_norm(problem, 1e-3 / 6, "l1")[1],
    }
    spreads = {side: np.abs(b).sum() / np.linalg.norm(b) / 6 for side, b in found.items()}
    assert {side: first[f"{side}_spread"] for side in found} == pytest.approx(spreads, rel=1e-5)
    assert first["mixer_spread"] != pytest.approx(first["frobenius_spread"], rel=1e-3)
    for entry in entries:
        assert entry["mixer"] >= entry["frobenius"] * (1 - 1e-9)
        assert entry["frobenius"] >= entry["l1"] * (1 - 1e-9)
    assert entries[-1]["mixer"] == entries[-1]["l1"] == problem.loss(np.zeros((6, 6)))
    assert entries[-1]["l1_spread"] is None
    assert entries[0]["mixer"] > 1.1 * entries[0]["l1"]


def test_the_command_prints_the_minima_of_each_lambda(tmp_path, widemix):
    sizes = ("--tokens", "2", "--channels", "3", "--samples", "20", "--noise", "0.5", "--seed", "7")
    code, said = widemix("analyse", "regularisation", *sizes, "--json", tmp_path / "numbers.json")
    assert code == 0, said
    entries = sweep(regression(2, 3, 20, 0.5, 7), np.geomspace(1e-3, 30, 16), 7)
    assert json.loads((tmp_path / "numbers.json").read_text()) == json.loads(json.dumps(entries))
    line = "lambda {decay:.4g}: Mixer {mixer:.4f}, Frobenius {frobenius:.4f}, L1 bound {l1:.4f}"
    assert said.splitlines()[:16] == [line.format(**entry) for entry in entries]
