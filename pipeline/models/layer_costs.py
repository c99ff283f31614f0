"""Cost records of layers and networks, enough to count weights, FLOPs and saved tensors without making a tensor."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from widemix.errors import InputError
from widemix.models.structured_factors import DENSE, Factor, Structure


@dataclass(frozen=True)
class LayerCost:
    """One linear layer applied to each of `rows` rows, I_rows (x) W, and what it saves for the backward pass."""

    rows: int
    inputs: int
    outputs: int
    nonzero: int | None = None  # weights that a mask leaves; None: all
    multiplied_dense: bool = False  # in spite of the mask, by a dense copy of W
    matrices: int = 1  # different W among the rows
    bias: int = 1  # vectors of as many numbers as outputs that are added to the rows of one W; 0: none
    mixes: bool = True  # counted as connections: a mixing layer, not the stem, a skip or the head
    activated: bool = False  # an activation follows, which saves this layer's output
    saves_input: bool = True  # False where another layer saves the same tensor
    input_gradient: bool = True  # False for the first layer: the image needs no gradient
    overlapping: tuple[int, int] | None = None  # rows share inputs: the effective matrix's nonzero and all entries

    @property
    def weights(self) -> int:
        """Nonzero entries of one W."""
        return self.inputs * self.outputs if self.nonzero is None else self.nonzero

    @property
    def parameters(self) -> int:
        """All different W, each with its bias."""
        return (self.weights + self.bias * self.outputs) * self.matrices

    @property
    def connections(self) -> int:
        """Nonzero entries of the effective matrix I_rows (x) W."""
        return self.overlapping[0] if self.overlapping else self.rows * self.weights

    @property
    def entries(self) -> int:
        """All entries of the effective matrix."""
        return self.overlapping[1] if self.overlapping else self.rows**2 * self.inputs * self.outputs

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of a forward product: of the weights, or of all entries of a dense copy."""
        return self.rows * (self.inputs * self.outputs if self.multiplied_dense else self.weights)

    @property
    def dense_copy(self) -> int:
        """Entries of a dense copy of a masked W, which PyTorch keeps for the backward pass."""
        return self.inputs * self.outputs if self.multiplied_dense else 0

    @property
    def backward_products(self) -> int:
        """Matrix products of this size in a backward pass: for the weights and for the input."""
        return 1 + self.input_gradient

    @property
    def saved(self) -> int:
        """Floats saved for the backward pass: the input, and the output where an activation follows."""
        return self.rows * (self.saves_input * self.inputs + self.activated * self.outputs)


@dataclass(frozen=True)
class NormCost:
    """A LayerNorm over `width` features of each of `rows` rows. It saves its input and two statistics per row.

    A batch norm has `statistics` 0: the number of those that it saves does not grow with the batch.
    """

    rows: int
    width: int
    statistics: int = 2

    @property
    def parameters(self) -> int:
        """Weight and bias."""
        return 2 * self.width

    @property
    def saved(self) -> int:
        """Floats saved for the backward pass."""
        return self.rows * (self.width + self.statistics)


@dataclass(frozen=True)
class NetworkCost:
    """Every layer of a network, stem to head, and what belongs to none of them; for one sample."""

    layers: Sequence[LayerCost]
    norms: Sequence[NormCost]
    width: int  # m, features
    extra_parameters: int = 0  # class tokens, embeddings
    extra_saved: int = 0  # floats saved for the backward pass
    extra_forward: int = 0  # FLOPs of products without weights: attention
    extra_backward: int = 0
    gamma: float | None = None  # expansion; None: the one that gives Omega at these tokens and channels
    tokens: int = 1  # S
    channels: int = 1  # C


def patch_layer(image_size: int, patch_size: int, channels: int) -> LayerCost:
    """The stem of networks of patches, 3-channel images [image_size, image_size] -> tokens [S0, channels]."""
    patches = (image_size // patch_size) ** 2
    return LayerCost(patches, 3 * patch_size**2, channels, mixes=False, input_gradient=False)


def mlp_layers(
    rows: int, inputs: int, hidden: int | None, outputs: int, groups: int = 1, structure: Structure = DENSE
) -> list[LayerCost]:
    """An MLP of one hidden layer on each row; with `hidden` None a single layer and an activation.

    groups: of rows, each with weights of its own. structure: of its matrices; each factor counts as a layer.
    """
    if hidden is None:
        return _layers(rows, structure.factors(inputs, outputs), groups, activated=True)
    return [
        *_layers(rows, structure.factors(inputs, hidden), groups, activated=True),
        *_layers(rows, structure.factors(hidden, outputs), groups, activated=False),
    ]


def _layers(rows: int, factors: Sequence[Factor], groups: int, activated: bool) -> list[LayerCost]:
    """The factors of a matrix with a bias on each row, as the block-diagonal matrices that they are."""
    return [
        LayerCost(
            rows * factor.matrices * factor.uses,
            factor.inputs,
            factor.outputs,
            matrices=groups * factor.matrices,
            bias=factor.uses if factor is factors[-1] else 0,
            activated=activated and factor is factors[-1],
        )
        for factor in factors
    ]


# Tokens and channels of Mixers with a given mean number of connections: Hayase & Karakida 2024, section 4.


def tokens_of(channels: float, omega: float, gamma: float) -> float:
    """The S that gives Omega = gamma (C S^2 + C^2 S) / 2 at this C: (sqrt(C^2 + 8 Omega / (gamma C)) - C) / 2."""
    return (math.sqrt(channels**2 + 8 * omega / (gamma * channels)) - channels) / 2


def widest(omega: float, gamma: float) -> float:
    """C* = S* = (Omega / gamma)^(1/3), where the effective width m = S*C is greatest."""
    return (omega / gamma) ** (1 / 3)


def pairs(omega: float, gamma: float, channels: Iterable[int]) -> list[tuple[int, int]]:
    """(C, S) with S rounded to whole tokens, for each C; `InputError` where S would be below 1."""
    result = []
    for count in channels:
        tokens = round(tokens_of(count, omega, gamma))
        if tokens < 1:
            raise InputError(
                f"C = {count}: at Omega = {omega:g}, gamma = {gamma:g} less than one token is left; take a smaller C"
            )
        result.append((count, tokens))
    return result
