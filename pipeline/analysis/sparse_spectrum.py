"""Largest singular values of randomly masked weights as they widen: `widemix analyse sparse-spectrum`.

Figures 4 (right) and S.1 of Hayase & Karakida 2024: with the number of connections fixed, the largest singular value
of a masked matrix rises with its width, that of a Mixer's weights does not.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse

from widemix.analysis.spectrum import marchenko_pastur_edge, singular_values, sparse_edge
from widemix.plots.style import COLORS, new_figure, styled


def masked_gaussian(rows: int, columns: int, density: float, random: np.random.Generator) -> scipy.sparse.csr_array:
    """Sample M * A [rows, columns]: M Bernoulli(density), the entries of variance 1 / columns as SW-MLPs start."""
    counts = random.binomial(columns, density, size=rows)
    places = [np.sort(random.choice(columns, count, replace=False, shuffle=False)) for count in counts]
    values = random.normal(size=counts.sum()) / np.sqrt(density * columns)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return scipy.sparse.csr_array((values, np.concatenate(places), starts), shape=(rows, columns))


def widening(
    connections: int, gamma: float, widths: Sequence[int], trials: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Return one entry for each width m: density p = Omega / (gamma m^2), measured values and edges (figure 4 right).

    `largest` are the largest singular values of `trials` random matrices [gamma m, m].
    """
    entries = []
    for width in widths:
        density, rows = connections / (gamma * width**2), round(gamma * width)
        random = [np.random.default_rng((seed, width, trial)) for trial in range(trials)]
        largest = [singular_values(masked_gaussian(rows, width, density, each))[0] for each in random]
        entries.append(
            {
                "width": width,
                "density": density,
                "largest": [float(value) for value in largest],
                "marchenko_pastur": marchenko_pastur_edge(rows, width),
                "l_plus": sparse_edge(gamma, width, density),
                "l_plus_as_printed": sparse_edge(gamma, width, density, printed=True),
            }
        )
    return entries


def scaling(connections: int, exponent: float, trials: int, seed: int = 0) -> np.ndarray:
    """Return singular values of figure S.1 (center): float64 [trials, m] of m x m matrices, m = Omega^((1 + a) / 2).

    The density is p = Omega^-a, `exponent` is a; scaled so that the mean of their squares is 1. Rows and columns
    without an entry are left out of the decomposition, and are zeros in the result.
    """
    width, density = round(connections ** ((1 + exponent) / 2)), connections**-exponent
    values = np.zeros((trials, width))
    for trial in range(trials):
        random = np.random.default_rng((seed, trial))
        matrix = masked_gaussian(width, width, density, random)
        rows, columns = (np.flatnonzero(np.diff(each.indptr)) for each in (matrix, matrix.tocsc()))
        found = np.linalg.svd(matrix[rows][:, columns].toarray(), compute_uv=False)
        values[trial, : len(found)] = found / np.sqrt(np.sum(found**2) / width)
    return values


def scalings(connections: int, exponents: Sequence[float], trials: int, seed: int = 0) -> dict[float, np.ndarray]:
    """Return `scaling` for each exponent."""
    return {exponent: scaling(connections, exponent, trials, seed) for exponent in exponents}


@styled
def plot_widening(entries: Sequence[dict[str, Any]], connections: int, gamma: float):
    """Return figure 4 (right), with L+ in both readings where they differ."""
    figure, axes = new_figure(5.6, 3.8)
    width = np.array([entry["width"] for entry in entries]) * gamma
    largest = np.array([entry["largest"] for entry in entries])
    mean, deviation = largest.mean(1), largest.std(1)
    axes.errorbar(
        width, mean, deviation, fmt="o-", color=COLORS[0], capsize=2, label="SW-MLP, masked weight (measured)"
    )
    axes.plot(
        width, [entry["l_plus"] for entry in entries], "--", color=COLORS[1], label=r"$\sqrt{L_+}$, $q^2=\gamma pm$"
    )
    if gamma != 1:
        printed = [entry["l_plus_as_printed"] for entry in entries]
        axes.plot(width, printed, ":", color=COLORS[1], label=r"$\sqrt{L_+}$ as printed, $q^2=pm$")
    edges = [entry["marchenko_pastur"] for entry in entries]
    axes.plot(width, edges, color=COLORS[6], label=r"Mixer, $1+\sqrt{\gamma}$ (Marchenko-Pastur)")
    axes.set(xlabel=r"width $\gamma m$", ylabel="largest singular value")
    axes.set_title(rf"$\Omega$ = {connections:,} connections, $\gamma$ = {gamma:g}")
    axes.legend(fontsize=8)
    return figure


@styled
def plot_scaling(connections: int, spectra: Mapping[float, np.ndarray]):
    """Return figure S.1 (center and right): all values at the last exponent, and the largest over the exponents."""
    figure, (left, right) = new_figure(8, 3.4, columns=2)
    exponents, last = [*spectra], [*spectra][-1]
    trials = len(spectra[last])
    left.hist(spectra[last].ravel(), bins=60, density=True, color=COLORS[0])
    left.set(xlabel="singular value", ylabel="density (logarithmic)", yscale="log")
    left.set_title(rf"$a$ = {last:g}: $m$ = {spectra[last].shape[1]:,}, {trials} matrices")
    largest = np.array([values[:, 0] for values in spectra.values()])
    right.errorbar(
        exponents, largest.mean(1), largest.std(1), fmt="o-", color=COLORS[0], capsize=2, label="masked weight"
    )
    right.axhline(2, color=COLORS[6], label="Mixer with $S=C$")
    right.set(xlabel=r"$a$, where $m=\Omega^{(1+a)/2}$ and $p=\Omega^{-a}$", ylabel="largest singular value", ylim=0)
    right.set_title(rf"$\Omega$ = {connections:,}")
    right.legend(fontsize=8, loc="upper left")
    return figure
