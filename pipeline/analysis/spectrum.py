"""Singular values of weights, and of the wide matrices that a Mixer's small weights stand for.

I (x) W and J2 (I (x) W) J1 have the singular values of W, each as often as W has rows to work on (Hayase & Karakida
2024, section 4.3): wide matrices are never made. Masked weights are decomposed as sparse matrices, products of block
diagonals by their matrix-vector products.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
import torch
from torch import Tensor, nn

from widemix.models.layers import BlockDiagonal, GroupedLinear
from widemix.models.pk_layers import MixingLayer
from widemix.models.plain_mlps.network import Monarch
from widemix.models.structured import StructuredLinear
from widemix.models.sw_mlp.sparse import SparseLinear

DENSE = 2048  # smaller side of the largest matrix that is decomposed whole: 20 s on a core
LANCZOS = 6  # singular values of larger ones, the largest


def marchenko_pastur_edge(rows: int, columns: int, std: float | None = None) -> float:
    """Return the largest singular value of a large random matrix: std (sqrt(rows) + sqrt(columns)).

    `std` of the entries is by default 1 / sqrt(columns), for which this is 1 + sqrt(gamma).
    """
    return (std or columns**-0.5) * (math.sqrt(rows) + math.sqrt(columns))


def sparse_edge(gamma: float, width: float, density: float, printed: bool = False) -> float:
    """Return sqrt(L+), the largest singular value of a masked Gaussian matrix [gamma * width, width].

    Its mask is Bernoulli(density), its entries have variance 1 / width. Equation 17 of Hayase & Karakida 2024,
    with q^2 = gamma * density * width in place of the printed density * width: their source (Hwang et al. 2019,
    theorem 2.9) is symmetric in rows and columns, and so are measured values. The two agree for gamma 1; `printed`
    gives the equation as it stands.
    """
    edge = (1 + math.sqrt(gamma)) ** 2
    q_squared = density * width * (1.0 if printed else gamma)
    return math.sqrt(edge + 3 * edge * math.sqrt(gamma) * (1 - density) / q_squared)


def kronecker_singular_values(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the singular values of first (x) second, descending: all products of theirs."""
    products = np.multiply.outer(*(np.linalg.svd(matrix, compute_uv=False) for matrix in (first, second)))
    return np.sort(products, axis=None)[::-1]


def singular_values(
    matrix: np.ndarray | scipy.sparse.sparray | scipy.sparse.linalg.LinearOperator, whole: int = DENSE
) -> np.ndarray:
    """Return the singular values of a matrix, descending: all, or of a smaller side beyond `whole` the largest."""
    if min(matrix.shape) <= whole:
        if isinstance(matrix, scipy.sparse.linalg.LinearOperator):
            matrix = matrix @ np.eye(matrix.shape[1])
        dense = matrix if isinstance(matrix, np.ndarray) else matrix.toarray()
        return np.linalg.svd(dense, compute_uv=False)
    if not isinstance(matrix, scipy.sparse.linalg.LinearOperator) and not abs(matrix).max():
        return np.zeros(LANCZOS)  # from which Lanczos cannot start
    start = np.random.default_rng(0).normal(size=min(matrix.shape))  # so that results are the same in every call
    return np.sort(scipy.sparse.linalg.svds(matrix, k=LANCZOS, v0=start, return_singular_vectors=False))[::-1]


@dataclass(frozen=True)
class LayerSpectrum:
    """Singular values of one layer's effective weight."""

    layer: str
    shape: tuple[int, int]  # of the weight W
    repeats: int  # rows that W works on: the effective weight I (x) W has each singular value so often
    values: np.ndarray  # float64, descending
    edge: float  # where the largest is at the start of training, by Marchenko-Pastur or L+; of a product, at most
    complete: bool  # False: the largest alone, by Lanczos
    spread: float | None = None  # |B|_1 / (sqrt(entries) |B|_F): 0.8 of Gaussian weights, smaller of sparse ones

    @property
    def largest(self) -> float:
        """The largest singular value."""
        return float(self.values[0])


def spectra(module: nn.Module, inputs: Tensor, start: nn.Module | None = None) -> list[LayerSpectrum]:
    """Return the spectrum of every linear layer, patch layer and masked layer, in the order of the forward pass.

    inputs: one sample as a batch, of any values. start: the network at the start of training, which edges of timm's
    own networks are taken from; default: `module`.
    """
    return [
        _spectrum(name, layer, repeats, _first_std(start or module, name))
        for name, layer, repeats in linear_layers(module, inputs)
    ]


def _first_std(start: nn.Module, name: str) -> float | None:
    """The deviation of a layer's first weights where they are timm's; None: ours, 1 / sqrt(columns), or zeros."""
    weight: Any = getattr(start.get_submodule(name), "weight", None)
    if not type(start).__module__.startswith("timm.") or weight is None:
        return None
    return weight.double().std(correction=0).item() or None


def products(module: nn.Module) -> list[LayerSpectrum]:
    """Return the spectrum of V (x) W of each block of an S-Mixer, W its token and V its channel mixing.

    It is what the block multiplies with where phi is left out (corollary 3.4 of Hayase & Karakida 2024). Its singular
    values and its spread are products of theirs; it is never made.
    """
    found = []
    for name, block in module.named_modules():
        mixings = [getattr(block, mixing, None) for mixing in ("mlp_tokens", "mlp_channels")]
        if not all(isinstance(mixing, MixingLayer) and isinstance(mixing.fc, nn.Linear) for mixing in mixings):
            continue
        w, v = (_numpy(mixing.fc.weight) for mixing in mixings if mixing is not None)
        edge = marchenko_pastur_edge(*v.shape) * marchenko_pastur_edge(*w.shape)
        shape = (v.shape[0] * w.shape[0], v.shape[1] * w.shape[1])
        values = kronecker_singular_values(v, w)
        found.append(LayerSpectrum(f"{name}.V (x) W", shape, 1, values, edge, True, spread(v) * spread(w)))
    return found


def spread(weight: np.ndarray) -> float:
    """Return |B|_1 / (sqrt(entries) |B|_F), 1 where all entries are as large, small where few are; nan of zeros."""
    length = float(np.linalg.norm(weight))
    return float(np.abs(weight).sum()) / (math.sqrt(weight.size) * length) if length else math.nan


def linear_layers(module: nn.Module, inputs: Tensor) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield name, module and number of rows per sample of each linear layer, in the order of the forward pass."""
    calls: dict[str, int] = {}
    within: list[str] = []
    handles = []
    for name, layer in module.named_modules():
        if any(name.startswith(f"{outer}.") for outer in within):
            continue
        if isinstance(layer, Monarch):
            within.append(name)  # a product of two block diagonals: one matrix
        if _is_linear(layer):
            rows = _count(calls, name)
            handles.append(layer.register_forward_hook(rows))
    try:
        with torch.no_grad():
            module(inputs)
    finally:
        for handle in handles:
            handle.remove()
    for name, repeats in calls.items():
        yield name, module.get_submodule(name), repeats


def _count(calls: dict[str, int], name: str):
    def hook(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        if isinstance(layer, nn.Conv2d):
            calls[name] = output.shape[2] * output.shape[3]
        elif isinstance(layer, nn.Linear | StructuredLinear):
            calls[name] = inputs[0].numel() // layer.in_features
        elif isinstance(layer, GroupedLinear):
            calls[name] = inputs[0].shape[1] // layer.groups
        elif isinstance(layer, BlockDiagonal):
            calls[name] = len(inputs[0])  # of one sample: a RepMLP has C / G rows for a set's matrices
        else:
            calls[name] = 1

    return hook


def _is_linear(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):  # of patches: each pixel is in one window
        return layer.kernel_size == layer.stride and layer.groups == 1
    return isinstance(layer, nn.Linear | GroupedLinear | SparseLinear | Monarch | BlockDiagonal | StructuredLinear)


def _spectrum(name: str, layer: nn.Module, repeats: int, std: float | None) -> LayerSpectrum:
    if isinstance(layer, SparseLinear):
        matrix = masked_matrix(layer)
        gamma = layer.outputs / layer.inputs
        edge = sparse_edge(gamma, layer.inputs, layer.density)
        return _of_matrix(name, matrix, repeats, edge)
    if isinstance(layer, Monarch):
        return _of_monarch(name, layer)
    if isinstance(layer, StructuredLinear):
        edges = (marchenko_pastur_edge(f.outputs, f.inputs, f.std) for f in layer.factors.values())
        return _of_matrix(name, _numpy(layer.dense_weight()), repeats, math.prod(edges))
    if isinstance(layer, BlockDiagonal) and layer.shared:
        return _of_matrix(name, _numpy(layer.weight), repeats)
    if isinstance(layer, BlockDiagonal | GroupedLinear):
        blocks = _numpy(layer.weight)
        values = np.sort(np.linalg.svd(blocks, compute_uv=False), axis=None)[::-1]
        rows, columns = layer.weight.shape[1:]
        shape = (len(blocks) * rows, len(blocks) * columns)
        return LayerSpectrum(name, shape, repeats, values, marchenko_pastur_edge(rows, columns), True)
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    matrix = _numpy(layer.weight).reshape(len(layer.weight), -1)
    return _of_matrix(name, matrix, repeats, marchenko_pastur_edge(*matrix.shape, std))


def _of_matrix(name: str, matrix, repeats: int, edge: float | None = None) -> LayerSpectrum:
    values, (rows, columns) = singular_values(matrix), matrix.shape
    edge = marchenko_pastur_edge(rows, columns) if edge is None else edge
    return LayerSpectrum(name, (rows, columns), repeats, values, edge, len(values) == min(matrix.shape))


def _of_monarch(name: str, layer: Monarch) -> LayerSpectrum:
    """Of J_c^T L J_c R: with equal blocks a Kronecker product, else known by its products with vectors."""
    left, right = layer.left, layer.right
    edge = math.prod(marchenko_pastur_edge(*block.weight.shape[-2:]) for block in (left, right))
    if right.shared:
        first, second = _numpy(left.weight), _numpy(right.weight)
        shape = first.shape[0] * second.shape[0], first.shape[1] * second.shape[1]
        return LayerSpectrum(name, shape, 1, kronecker_singular_values(first, second), edge, True)
    inputs = layer.rows * right.weight.shape[2]
    operator = linear_operator(layer, inputs, next(layer.parameters()))
    values = singular_values(operator)
    return LayerSpectrum(name, operator.shape, 1, values, edge, len(values) == min(operator.shape))


def linear_operator(layer: nn.Module, inputs: int, like: Tensor) -> scipy.sparse.linalg.LinearOperator:
    """Return a linear module [B, inputs] -> [B, outputs] as an operator; its transpose is its derivative's."""
    zeros = torch.zeros(1, inputs, dtype=like.dtype, device=like.device)
    derivative: Any = torch.func.vjp(layer, zeros)  # its type says three values, of which the third is optional
    outputs, transpose = derivative

    def apply(function, vectors: np.ndarray) -> np.ndarray:
        rows = torch.from_numpy(np.ascontiguousarray(vectors.reshape(len(vectors), -1).T)).to(like)
        with torch.no_grad():
            return function(rows).double().cpu().numpy().T

    def backward(rows: Tensor) -> Tensor:
        return torch.cat([transpose(row[None])[0] for row in rows])

    return scipy.sparse.linalg.LinearOperator(
        (outputs.shape[1], inputs),
        matvec=lambda x: apply(layer, x)[:, 0],
        rmatvec=lambda x: apply(backward, x)[:, 0],
        matmat=lambda x: apply(layer, x),
        dtype=np.float64,
    )


def masked_matrix(layer: SparseLinear) -> scipy.sparse.csr_array:
    """Return M * W of a masked layer as a sparse matrix [outputs, inputs], float64."""
    parts = (layer.values.detach().double(), layer.columns, layer.row_starts)
    values, columns, starts = (tensor.cpu().numpy() for tensor in parts)
    return scipy.sparse.csr_array((values, columns, starts), shape=(layer.outputs, layer.inputs))


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().cpu().numpy()
