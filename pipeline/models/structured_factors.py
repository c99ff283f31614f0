"""The factors that a structured matrix W [O, I] is made of: their sizes, from which follow cost, start and rates.

Qiu, Potapczynski et al. 2024, "Compute Better Spent: Replacing Dense Layers with Structured Matrices". With I = g d
and O = a b, both split into the two factors nearest to each other, the smaller first,

    low_rank        W = L R: [O, r] times [r, I]
    kronecker       W = L (x) R: [a, g] and [b, d]
    btt             W[(a b), (g d)] = sum over r of L[b][a, (g r)] R[g][(b r), d], the block tensor train
    monarch         a btt of rank 1: two block diagonals with a transposition between them
    block_diagonal  W = diag(W_1, ..., W_k): k times [O / k, I / k]
"""

import math
from dataclasses import dataclass
from typing import Literal

Weights = Literal["dense", "low_rank", "kronecker", "monarch", "btt", "block_diagonal"]
Rank = int | Literal["as_dense"]


@dataclass(frozen=True)
class Factor:
    """So many `matrices` [outputs, inputs], of which each multiplies `uses` vectors of every row."""

    matrices: int
    uses: int
    inputs: int
    outputs: int

    @property
    def parameters(self) -> int:
        """Entries of all its matrices."""
        return self.matrices * self.inputs * self.outputs

    @property
    def multiply_adds(self) -> int:
        """Of a row's product."""
        return self.parameters * self.uses

    @property
    def std(self) -> float:
        """The standard deviation of its first entries: sqrt(1 / inputs) min(1, sqrt(outputs / inputs))."""
        return self.inputs**-0.5 * min(1.0, (self.outputs / self.inputs) ** 0.5)


@dataclass(frozen=True)
class Structure:
    """A kind of matrix, with the rank of low_rank and btt, and the number of blocks of block_diagonal.

    rank: `as_dense` is the greatest whose product costs no more than that of a dense matrix.
    """

    kind: Weights
    rank: Rank | None = None
    blocks: int | None = None

    def rank_for(self, inputs: int, outputs: int) -> int:
        """The rank of a matrix of these sizes; 1 where there is none."""
        if self.kind not in ("low_rank", "btt"):
            return 1
        if isinstance(self.rank, int):
            return self.rank
        one = sum(factor.multiply_adds for factor in Structure(self.kind, 1).factors(inputs, outputs))
        return max(1, inputs * outputs // one)

    def factors(self, inputs: int, outputs: int) -> tuple[Factor, ...]:
        """The factors of a matrix [outputs, inputs] in the order in which they multiply: R, then L."""
        (g, d), (a, b) = split(inputs), split(outputs)
        rank, blocks = self.rank_for(inputs, outputs), self.blocks or 1
        match self.kind:
            case "dense":
                return (Factor(1, 1, inputs, outputs),)
            case "low_rank":
                return Factor(1, 1, inputs, rank), Factor(1, 1, rank, outputs)
            case "kronecker":
                return Factor(1, g, d, b), Factor(1, b, g, a)
            case "btt" | "monarch":
                return Factor(g, 1, d, b * rank), Factor(b, 1, g * rank, a)
            case "block_diagonal":
                return (Factor(blocks, 1, inputs // blocks, outputs // blocks),)

    def fault(self, inputs: int, outputs: int) -> str:
        """Why a matrix of these sizes cannot have the structure; empty if it can."""
        if self.kind == "block_diagonal":
            odd = [width for width in (inputs, outputs) if width % (self.blocks or 1)]
            return f"{self.blocks} blocks do not divide a width of {odd[0]}" if odd else ""
        if self.kind in ("kronecker", "monarch", "btt"):
            prime = [width for width in (inputs, outputs) if split(width)[0] == 1]
            return f"a width of {prime[0]} is no product of two" if prime else ""
        return ""

    def full_rank(self, inputs: int, outputs: int) -> int:
        """The rank of W with almost all factors."""
        factors = self.factors(inputs, outputs)
        if self.kind == "kronecker":  # the product of its factors' ranks
            return math.prod(min(factor.inputs, factor.outputs) for factor in factors)
        return min(inputs, outputs, *(factor.matrices * min(factor.inputs, factor.outputs) for factor in factors))


DENSE = Structure("dense")


def split(size: int) -> tuple[int, int]:
    """Return the two factors of `size` nearest to each other, the smaller first."""
    smaller = next(d for d in range(math.isqrt(size), 0, -1) if size % d == 0)
    return smaller, size // smaller
