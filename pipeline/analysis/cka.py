"""Centered kernel alignment (CKA) of features, in mini-batches (Nguyen, Raghu & Kornblith 2021, section 3.1).

HSIC of two kernel matrices is estimated without bias on each mini-batch (Song et al. 2012), and averaged over the
mini-batches before CKA is formed:

    CKA = sum HSIC(K, L) / sqrt(sum HSIC(K, K) sum HSIC(L, L)),  K = X X^T, L = Y Y^T

Memory does not depend on the number of samples. One mini-batch of all samples gives the full-batch formula.

Shapes: n samples of a mini-batch, N samples in all, F features (any further axes are flattened).
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

LEAST = 4  # samples of a mini-batch: the estimator divides by n (n - 3)


def centered_kernel(features: Tensor) -> Tensor:
    """Return the linear kernel of features [n, ...], centred for the unbiased HSIC, float64 [n, n]; zero diagonal.

    The sum of the product of two such matrices is n (n - 3) times the unbiased estimate of HSIC.
    """
    x = features.flatten(1).float()
    x = x - x[0]  # what is constant is exactly 0 then, which it less its rounded mean need not be
    x = x - x.mean(0)  # changes nothing in exact arithmetic; keeps digits where the first sample is far off
    kernel = (x @ x.T).double()
    n = len(kernel)
    kernel.fill_diagonal_(0)
    rows = kernel.sum(1) / (n - 2)
    kernel = kernel - rows[:, None] - rows[None, :] + rows.sum() / (n - 1)
    return kernel.fill_diagonal_(0)


class MinibatchCka:
    """Accumulates CKA between two lists of features, a mini-batch at a time."""

    def __init__(self) -> None:
        self._cross = self._rows = self._columns = np.zeros(())
        self.samples = 0

    def update(self, rows: Sequence[Tensor], columns: Sequence[Tensor]) -> None:
        """Add the kernels that `centered_kernel` gave for the same n samples; n may differ between batches."""
        n = len(rows[0])
        if n < LEAST:
            raise ValueError(f"a mini-batch of {n} samples: unbiased HSIC needs at least {LEAST}")
        x, y = (torch.stack([kernel.flatten() for kernel in kernels]) for kernels in (rows, columns))
        weight = n / (n * (n - 3))  # mini-batches count by their samples
        self._cross = self._cross + weight * (x @ y.T).cpu().numpy()
        self._rows = self._rows + weight * x.square().sum(1).cpu().numpy()
        self._columns = self._columns + weight * y.square().sum(1).cpu().numpy()
        self.samples += n

    def values(self) -> np.ndarray:
        """Return CKA of each row with each column, float64 [rows, columns]; nan where a feature is constant."""
        scale = np.sqrt(np.outer(self._rows, self._columns))
        return np.divide(self._cross, scale, out=np.full(scale.shape, np.nan), where=scale > 0)


def cka(rows: Mapping[str, ArrayLike], columns: Mapping[str, ArrayLike], batch: int | None = None) -> np.ndarray:
    """Return CKA between two sets of features of the same N samples, arrays [N, ...]: float64 [rows, columns].

    In mini-batches of `batch` samples in the order given, which should be random; None is one of all samples. Fewer
    than four samples that remain are left out.
    """
    features = [[torch.as_tensor(np.asarray(array)) for array in side.values()] for side in (rows, columns)]
    sizes = {len(array) for side in features for array in side}
    if len(sizes) != 1:
        raise ValueError(f"features of {sorted(sizes)} samples: all must be of the same samples")
    count = sizes.pop()
    total = MinibatchCka()
    for start in range(0, count, batch or count):
        stop = min(start + (batch or count), count)
        if stop - start >= LEAST or start == 0:
            total.update(*([centered_kernel(array[start:stop]) for array in side] for side in features))
    return total.values()


def diagonal_mean(values: np.ndarray) -> float | None:
    """Return the mean of the diagonal (figure 2a of Hayase & Karakida 2024), without layers that are constant.

    None unless the matrix is square; nan where all are constant.
    """
    if values.shape[0] != values.shape[1]:
        return None
    diagonal = np.diag(values)
    known = diagonal[~np.isnan(diagonal)]
    return float(known.mean()) if len(known) else math.nan


def random_samples(count: int, most: int | None, batch: int, seed: int) -> np.ndarray:
    """Return the samples to compare on, int64 [n], in random order: at most `most` of `count`, in whole mini-batches.

    In the order of a file that is sorted by class, a mini-batch would hold a few classes only. A rest of fewer than
    four samples is left out.
    """
    order = np.random.default_rng(seed).permutation(count)[:most]
    rest = len(order) % batch
    return order[: len(order) - rest] if 0 < rest < LEAST < len(order) else order
