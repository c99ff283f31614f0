"""Layers of structured matrices (see `structured_factors`) on each of n rows, W x + b: [B, n, I] -> [B, n, O].

Shapes: B batch, n rows, I = g d inputs, O = a b outputs, r rank, k blocks.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from widemix.models.structured_factors import Factor, Structure


class StructuredLinear(nn.Module):
    """W x + b: [B, n, I] -> [B, n, O]. The parameters are the factors `right` and, where there are two, `left`."""

    right: Tensor
    left: Tensor

    def __init__(self, structure: Structure, inputs: int, outputs: int):
        super().__init__()
        self.structure, self.in_features, self.out_features = structure, inputs, outputs
        self.factors = dict(zip(("right", "left"), structure.factors(inputs, outputs), strict=False))
        for name, factor in self.factors.items():
            self.register_parameter(name, _parameter(factor))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.reset_parameters()

    @torch.jit.ignore
    def reset_parameters(self) -> None:
        """Sample each factor from N(0, `Factor.std`^2); the bias is 0."""
        for name, factor in self.factors.items():
            nn.init.normal_(self.get_parameter(name), std=factor.std)
        nn.init.zeros_(self.bias)

    @property
    @torch.jit.unused
    def rate_factors(self) -> dict[str, float]:
        """Factor of the learning rate by parameter: I over the inputs of the factor, over the number of factors.

        The output then moves in a step as far as that of a dense matrix, whatever the widths (Qiu et al. 2024).
        """
        count = len(self.factors)
        return {name: self.in_features / factor.inputs / count for name, factor in self.factors.items()}

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, I] -> [B, n, O]."""
        return self.product(x) + self.bias

    def product(self, x: Tensor) -> Tensor:
        """W x: [B, n, I] -> [B, n, O]."""
        raise NotImplementedError

    @torch.jit.ignore
    def dense_weight(self) -> Tensor:
        """W, [O, I], differentiable in the factors."""
        unit = torch.eye(self.in_features, dtype=self.bias.dtype, device=self.bias.device)
        return self.product(unit[None])[0].T

    def extra_repr(self) -> str:
        """For print(module)."""
        return f"{self.structure.kind}, in_features={self.in_features}, out_features={self.out_features}"


class LowRank(StructuredLinear):
    """W = L R, [O, r] times [r, I]."""

    def product(self, x: Tensor) -> Tensor:
        """[B, n, I] -> [B, n, O]."""
        return x @ self.right.T @ self.left.T


class Kronecker(StructuredLinear):
    """W = L (x) R, [a, g] and [b, d]."""

    def product(self, x: Tensor) -> Tensor:
        """[B, n, I] -> [B, n, O]."""
        x = x.unflatten(2, (self.left.shape[1], self.right.shape[1])) @ self.right.T  # [B, n, g, b]
        return (self.left @ x).flatten(2)  # [B, n, a, b]


class BlockTensorTrain(StructuredLinear):
    """R, [g, b r, d], then L, [b, a, g r], block by block; of rank 1 a Monarch matrix."""

    def product(self, x: Tensor) -> Tensor:
        """[B, n, I] -> [B, n, O]."""
        (blocks, _, inputs), others = self.right.shape, self.left.shape[0]
        lead = x.shape[:2]
        x = x.reshape(lead.numel(), blocks, inputs).transpose(0, 1)  # [g, B n, d]
        x = x @ self.right.transpose(1, 2)  # [g, B n, b r]
        x = x.unflatten(2, (others, self.right.shape[1] // others))
        x = x.permute(2, 1, 0, 3).flatten(2)  # [b, B n, g r]
        x = x @ self.left.transpose(1, 2)  # [b, B n, a]
        return x.permute(1, 2, 0).reshape(*lead, self.out_features)


class DiagonalBlocks(StructuredLinear):
    """W = diag(R_1, ..., R_k), [k, O / k, I / k]."""

    def product(self, x: Tensor) -> Tensor:
        """[B, n, I] -> [B, n, O]."""
        (blocks, _, inputs), lead = self.right.shape, x.shape[:2]
        x = x.reshape(lead.numel(), blocks, inputs).transpose(0, 1) @ self.right.transpose(1, 2)  # [k, B n, O / k]
        return x.transpose(0, 1).reshape(*lead, self.out_features)


_MODULES: dict[str, type[StructuredLinear]] = {
    "low_rank": LowRank,
    "kronecker": Kronecker,
    "monarch": BlockTensorTrain,
    "btt": BlockTensorTrain,
    "block_diagonal": DiagonalBlocks,
}
STRUCTURED = frozenset(_MODULES.values())


def linear_of(structure: Structure) -> Callable[[int, int], nn.Linear | StructuredLinear]:
    """Return what makes a layer of so many inputs and outputs."""
    return nn.Linear if structure.kind == "dense" else partial(_MODULES[structure.kind], structure)


def _parameter(factor: Factor) -> nn.Parameter:
    """[matrices, outputs, inputs]; of one matrix [outputs, inputs]."""
    shape = (factor.outputs, factor.inputs)
    return nn.Parameter(torch.empty(shape if factor.matrices == 1 else (factor.matrices, *shape)))
