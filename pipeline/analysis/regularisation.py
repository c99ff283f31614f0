"""The implicit L1 regularisation of a linear S-Mixer: `widemix analyse regularisation`.

Proposition 3.3 of Hayase & Karakida 2024, for any loss L of an SC x SC matrix:

    min_{V, W} L(V (x) W) + lambda / 2 (|V|_F^2 + |W|_F^2)  >=  min_B L(B) + lambda / (SC) |B|_1

The proof goes by |V (x) W|_F: the left side is the minimum of L(B) + lambda |B|_F over Kronecker products, so that
the minimum of this over all matrices lies between the two sides. Here L is the mean squared error of a linear
regression, L(B) = |Y - X B^T|_F^2 / (2 n), for which all three minima can be computed.

Shapes: n samples, d = S*C; X and Y [n, d], V [C, C], W [S, S], B [d, d].
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from widemix.plots.style import new_figure, styled

RESTARTS = 8  # of the left side, whose loss is not convex


@dataclass(frozen=True)
class Regression:
    """Inputs X and outputs Y of a linear regression, float64 [n, d] each, of a teacher V (x) W with noise."""

    tokens: int
    channels: int
    x: np.ndarray
    y: np.ndarray

    def loss(self, b: np.ndarray) -> float:
        """Return |Y - X B^T|_F^2 / (2 n)."""
        return float(((self.y - self.x @ b.T) ** 2).sum() / (2 * len(self.x)))


def regression(tokens: int, channels: int, samples: int, noise: float, seed: int) -> Regression:
    """Sample Gaussian inputs, a sparse teacher V (x) W (a third of the entries of V and of W), and Gaussian noise."""
    random = np.random.default_rng(seed)
    v, w = (_sparse(k, random) for k in (channels, tokens))
    x = random.normal(size=(samples, tokens * channels))
    y = x @ np.kron(v, w).T
    return Regression(tokens, channels, x, y + noise * y.std() * random.normal(size=y.shape))


def _sparse(size: int, random: np.random.Generator) -> np.ndarray:
    matrix = np.zeros(size * size)
    places = random.choice(size * size, max(1, round(size * size / 3)), replace=False)
    matrix[places] = random.normal(size=len(places))
    return matrix.reshape(size, size)


def minimise_kronecker(problem: Regression, decay: float, seed: int = 0) -> tuple[float, np.ndarray]:
    """Return the least value found of the left side, lambda = `decay`, and its V (x) W.

    Ridge regressions of V and of W in turn, each exact, from `RESTARTS` random starts: an upper bound of the minimum.
    """
    random = np.random.default_rng(seed)
    best = problem.loss(np.zeros((problem.x.shape[1],) * 2)), np.zeros((problem.x.shape[1],) * 2)
    for _ in range(RESTARTS):
        v, w = (random.normal(size=(k, k)) / np.sqrt(k) for k in (problem.channels, problem.tokens))
        before = np.inf
        for _ in range(2000):
            v = _solve(problem, w, decay, solve_for_v=True)
            w = _solve(problem, v, decay, solve_for_v=False)
            value = problem.loss(np.kron(v, w)) + decay / 2 * float((v**2).sum() + (w**2).sum())
            if before - value < 1e-10 * value:
                break
            before = value
        best = min(best, (value, np.kron(v, w)), key=lambda pair: pair[0])
    return best


def _solve(problem: Regression, fixed: np.ndarray, decay: float, solve_for_v: bool) -> np.ndarray:
    """Return the V (or W) that is best for a given W (or V): a ridge regression on inputs that the other mixes."""
    n = len(problem.x)
    shape = n, problem.channels, problem.tokens  # (V (x) W) x = vec(W X V^T) has V along the slower axis
    x, y = problem.x.reshape(shape), problem.y.reshape(shape)
    if solve_for_v:
        mixed, target = x @ fixed.T, y  # [n, C, S], V works on the rows
        inputs, outputs = (a.transpose(0, 2, 1).reshape(-1, problem.channels) for a in (mixed, target))
    else:
        mixed = np.einsum("ij,njs->nis", fixed, x)
        inputs, outputs = mixed.reshape(-1, problem.tokens), y.reshape(-1, problem.tokens)
    gram = inputs.T @ inputs / n + decay * np.eye(inputs.shape[1])
    return np.linalg.solve(gram, inputs.T @ outputs / n).T


def minimise_norm(problem: Regression, decay: float, norm: str) -> tuple[float, np.ndarray]:
    """Return min_B L(B) + decay |B|, and B, for |B|_1 (`l1`) or |B|_F (`frobenius`): accelerated proximal steps.

    Both problems are convex. Stops when the value has settled to a relative 1e-12.
    """
    n, d = problem.x.shape
    gram, cross = problem.x.T @ problem.x / n, problem.y.T @ problem.x / n
    step = 1 / np.linalg.eigvalsh(gram)[-1]
    b = ahead = np.zeros((d, d))
    momentum, values = 1.0, [float("inf")]
    for _ in range(20_000):
        moved = _shrink(ahead - step * (ahead @ gram - cross), step * decay, norm)
        grown = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        ahead = moved + (momentum - 1) / grown * (moved - b)
        b, momentum = moved, grown
        values.append(problem.loss(b) + decay * float(np.abs(b).sum() if norm == "l1" else np.linalg.norm(b)))
        if values[-1] > values[-2]:
            momentum, ahead = 1.0, b  # restart (O'Donoghue & Candes 2015)
        elif len(values) > 50 and values[-50] - values[-1] <= 1e-12 * values[-1]:
            break
    return min(values), b


def _shrink(b: np.ndarray, by: float, norm: str) -> np.ndarray:
    """The proximal operator of by |B|."""
    if norm == "l1":
        return np.sign(b) * np.maximum(np.abs(b) - by, 0)
    length = np.linalg.norm(b)
    return b * max(0.0, 1 - by / length) if length else b


def sweep(problem: Regression, decays: np.ndarray, seed: int = 0) -> list[dict[str, Any]]:
    """Return both sides of proposition 3.3, and the minimum between them, for each lambda.

    For each side also |B|_1 / |B|_F of its matrix over d, the largest that it can be: small where B is sparse, None
    where it is zero.
    """
    size, entries = problem.tokens * problem.channels, []
    for decay in map(float, decays):
        sides = {
            "mixer": minimise_kronecker(problem, decay, seed),
            "frobenius": minimise_norm(problem, decay, "frobenius"),
            "l1": minimise_norm(problem, decay / size, "l1"),
        }
        spreads = {f"{side}_spread": _spread(b) for side, (_, b) in sides.items()}
        entries.append({"decay": decay, **{side: least for side, (least, _) in sides.items()}, **spreads})
    return entries


def _spread(b: np.ndarray) -> float | None:
    length = np.linalg.norm(b)
    return float(np.abs(b).sum() / (length * len(b))) if length else None


@styled
def plot_sweep(entries: list[dict[str, Any]], problem: Regression):
    """Return the figure: the three minima over lambda, and how far each matrix spreads over its entries."""
    figure, (left, right) = new_figure(8.4, 3.6, columns=2)
    decays = [entry["decay"] for entry in entries]
    lines = {
        "mixer": r"Mixer: $L(V\otimes W)+\frac{\lambda}{2}(\|V\|_F^2+\|W\|_F^2)$",
        "frobenius": r"$L(B)+\lambda\|B\|_F$",
        "l1": r"bound: $L(B)+\frac{\lambda}{SC}\|B\|_1$",
    }
    for name, text in lines.items():
        left.plot(decays, [entry[name] for entry in entries], label=text)
        spread = [entry[f"{name}_spread"] for entry in entries]
        right.plot(decays, np.array(spread, float))
    left.set(xscale="log", ylim=0, xlabel=r"$\lambda$", ylabel="minimum")
    sizes = f"S = {problem.tokens}, C = {problem.channels}, {len(problem.x)} samples"
    left.set_title(f"linear regression, {sizes}")
    left.legend(fontsize=8)
    right.set(xscale="log", xlabel=r"$\lambda$", ylabel=r"$\|B\|_1\,/\,(SC\,\|B\|_F)$", ylim=(0, 1))
    right.set_title("spread of the minimiser: small where it is sparse")
    return figure
