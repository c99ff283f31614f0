"""Networks as lists of layers, enough to count what they cost without making a tensor."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Dense:
    """I_rows (x) W: one layer applied to each of `rows` rows, and what it leaves in memory for the backward pass."""

    rows: int
    inputs: int
    outputs: int
    nonzero: int | None = None  # weights that are there, where a mask or a structure leaves some out
    matrices: int = 1  # different ones among the rows
    bias: bool = True
    mixes: bool = True  # counts among the connections: a mixing layer, not the stem, a skip or the head
    activated: bool = False  # an activation follows, which keeps this layer's output
    keeps_input: bool = True  # False where somebody else keeps the same tensor
    input_gradient: bool = True  # False for the first layer: nobody asks for the picture's gradient

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs if self.nonzero is None else self.nonzero

    @property
    def parameters(self) -> int:
        return self.weights * self.matrices + self.bias * self.outputs

    @property
    def connections(self) -> int:
        """Nonzero entries of the effective matrix."""
        return self.rows * self.weights

    @property
    def entries(self) -> int:
        """All entries of the effective matrix."""
        return self.rows**2 * self.inputs * self.outputs

    @property
    def backward_products(self) -> int:
        """Matrix products of this size in a backward pass: for the weights and for the input."""
        return 1 + self.input_gradient

    @property
    def kept(self) -> int:
        """Floats saved for the backward pass: the input, and the output where an activation follows."""
        return self.rows * (self.keeps_input * self.inputs + self.activated * self.outputs)


@dataclass(frozen=True)
class Norm:
    """A LayerNorm over `width` features of each of `rows` rows. It keeps its input and two numbers a row.

    Or a batch norm, `statistics` 0: what it keeps of the statistics does not grow with the batch.
    """

    rows: int
    width: int
    statistics: int = 2

    @property
    def parameters(self) -> int:
        return 2 * self.width

    @property
    def kept(self) -> int:
        return self.rows * (self.width + self.statistics)


@dataclass(frozen=True)
class Network:
    layers: Sequence[Dense]
    norms: Sequence[Norm]
    width: int  # m
    extra_parameters: int = 0  # that belong to no layer: class tokens and the like
    extra_kept: int = 0  # floats that something else keeps
    extra_forward: int = 0  # FLOPs of products without weights: attention
    extra_backward: int = 0
    gamma: float | None = None  # None: the one that gives Omega at these S and C
    tokens: int = 1
    channels: int = 1
