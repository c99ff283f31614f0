"""Features of layers, and centered kernel alignment (CKA) in mini-batches (Nguyen, Raghu & Kornblith 2021, 3.1).

HSIC of two kernel matrices is estimated without bias on each mini-batch (Song et al. 2012), and averaged over the
mini-batches before CKA is formed:

    CKA = sum HSIC(K, L) / sqrt(sum HSIC(K, K) sum HSIC(L, L)),  K = X X^T, L = Y Y^T

Memory does not depend on the number of samples. One mini-batch of all samples gives the full-batch formula.

Shapes: n samples of a mini-batch, N samples in all, F features (any further axes are flattened).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from widemix.errors import InputError

Reduced = TypeVar("Reduced")

# Modules whose output is added to a skip connection, by the last part of their names, in our networks and timm's.
_MIXERS = {"mlp_tokens", "mlp_channels", "linear_tokens", "outer_act", "mlp1", "mlp2", "mix", "gated", "ffn"}
_BRANCHES = _MIXERS | {"attn", "mlp", "self_attn", "linear2"}


def layers_before_skips(module: nn.Module) -> list[str]:
    """Return the names of the modules whose outputs are added to skip connections, in the order of the network.

    `InputError` if it has none with a usual name.
    """
    chosen: list[str] = []
    for name, _ in module.named_modules():
        inside = any(name.startswith(f"{other}.") for other in chosen)
        if name.rpartition(".")[2] in _BRANCHES and not inside:
            chosen.append(name)
    if not chosen:
        known = ", ".join(name for name, _ in module.named_modules() if name.count(".") == 1)
        raise InputError(f"no layers with a usual name before skip connections; name some as patterns, of {known}")
    return chosen


def layers_by_pattern(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of the modules that match a pattern such as `blocks.*.norm1`; `InputError` for one without."""
    names = [name for name, _ in module.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            some = ", ".join(names[:6])
            raise InputError(f"layers {pattern}: matches no module of the network; its names are {some}, ...")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


@torch.no_grad()
def layer_features(
    module: nn.Module, inputs: Tensor, layers: Sequence[str], reduce: Callable[[Tensor], Reduced]
) -> dict[str, Reduced]:
    """Return `reduce` of the output of each named layer for one batch of inputs, in the order of `layers`.

    A layer of several outputs counts with its first. The outputs themselves are not kept, so that the memory is that
    of one forward pass.
    """
    features: dict[str, Reduced] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
            features[name] = reduce(output[0] if isinstance(output, tuple) else output)

        return hook

    handles = [module.get_submodule(name).register_forward_hook(record(name)) for name in layers]
    try:
        module(inputs)
    finally:
        for handle in handles:
            handle.remove()
    if silent := [name for name in layers if name not in features]:
        raise InputError(f"layer {silent[0]}: the network's forward pass does not call it; name others")
    return {name: features[name] for name in layers}


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
