"""The permuted Kronecker layer of Hayase & Karakida 2024, definition 5.1.

    PK(X; J_1, J_2) = phi[J_2 (I_n (x) W) J_1 vec X]

Every mixing of a Mixer is one: permute the m entries, apply the same small layer to each of n rows, permute back.
In rows of channels, channel mixing has J_1 = J_2 = I, and token mixing J_1 = J_c, J_2 = J_c^T.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from widemix.models import permutation
from widemix.models.layers import GroupedLinear
from widemix.models.permutation import Permute, Transpose
from widemix.models.structured import StructuredLinear

Layer = nn.Linear | GroupedLinear | StructuredLinear
MakeLayer = Callable[[int, int], Layer]


class Permutations(NamedTuple):
    """The permutations before, inside (before phi) and after the layers of one mixing."""

    inward: nn.Module
    hidden: nn.Module
    outward: nn.Module


def token_permutations() -> Permutations:
    """The normal token mixing: rows of channels -> rows of tokens -> rows of channels."""
    return Permutations(Transpose(), nn.Identity(), Transpose())


def channel_permutations() -> Permutations:
    """The normal channel mixing: no permutation at all."""
    return Permutations(nn.Identity(), nn.Identity(), nn.Identity())


def random_permutations(
    rows: int, widths: Sequence[int], channels: int, key: Sequence[int], each_layer: bool
) -> Permutations:
    """Independent random permutations, frozen and saved with the weights.

    `rows` is n and `widths` are those of the layers on a row, first to last; the output is in rows of `channels`.
    With `each_layer` the hidden features are permuted too (section 5.2), else only input and output (appendix
    A.2.3). Between two layers there is one permutation, the product of theirs, since phi commutes with it.
    """
    first, *hidden, last = widths
    inward = Permute(permutation.random(rows * first, (*key, 0)), columns=first)
    outward = Permute(permutation.random(rows * last, (*key, 1)), columns=channels)
    if not (each_layer and hidden):
        return Permutations(inward, nn.Identity(), outward)
    return Permutations(inward, Permute(permutation.random(rows * hidden[0], (*key, 2)), columns=hidden[0]), outward)


class Square(nn.Module):
    """sigma_2(x) = |x|^2 (Navon & Bronstein 2023)."""

    def forward(self, x: Tensor) -> Tensor:
        """The square of each entry."""
        return x.square()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "square": Square,
}


class MixingLayer(nn.Module):
    """J_out phi((I (x) W) J_in x): the one-layer mixing of the S-Mixer, [B, S0, C] -> [B, S, C]."""

    def __init__(
        self, widths: tuple[int, int], permutations: Permutations, activation: str, layer: MakeLayer = nn.Linear
    ):
        super().__init__()
        self.permute_in = permutations.inward
        self.fc = layer(*widths)
        self.act = ACTIVATIONS[activation]()
        self.permute_out = permutations.outward

    def forward(self, x: Tensor) -> Tensor:
        """[B, S0, C] -> [B, S, C]."""
        x = _rows(self.permute_in(x))  # rows to mix: [B, C, S0] for tokens, [B, S, C] for channels
        return self.permute_out(self.act(self.fc(x)))


class MixingMlp(nn.Module):
    """J_out (I (x) W2) phi(J_hidden (I (x) W1) J_in x): the MLP-Mixer's two-layer mixing, [B, S0, C] -> [B, S, C]."""

    def __init__(
        self, widths: tuple[int, int, int], permutations: Permutations, activation: str, layer: MakeLayer = nn.Linear
    ):
        super().__init__()
        width, hidden, out = widths
        self.permute_in = permutations.inward
        self.fc1 = layer(width, hidden)
        self.permute_hidden = permutations.hidden
        self.act = ACTIVATIONS[activation]()
        self.fc2 = layer(hidden, out)
        self.permute_out = permutations.outward

    def forward(self, x: Tensor) -> Tensor:
        """[B, S0, C] -> [B, S, C]."""
        x = _rows(self.permute_in(x))  # rows to mix: [B, C, S0] for tokens, [B, S, C] for channels
        x = self.act(self.permute_hidden(self.fc1(x)))
        return self.permute_out(self.fc2(x))


def weigh(layer: Layer, x: Tensor) -> Tensor:
    """A mixing's layer on rows [B, n, I] without its bias: [B, n, O]."""
    if isinstance(layer, nn.Linear):
        return x @ layer.weight.T
    if isinstance(layer, StructuredLinear):
        return layer.product(x)
    return layer.product(x, torch.zeros_like(layer.bias))


def _rows(x: Tensor) -> Tensor:
    """The same entries in a row of memory: the product, which would copy them too, then adds the bias itself."""
    return x.contiguous()


Mixing = MixingLayer | MixingMlp


def mixing(
    widths: Sequence[int], permutations: Permutations, activation: str, layer: MakeLayer = nn.Linear
) -> Mixing:
    """Return a mixing of layers of these widths, first to last: a single layer of two, an MLP of three.

    layer: makes a `Layer` on rows, of so many inputs and outputs.
    """
    if len(widths) == 2:
        return MixingLayer((widths[0], widths[1]), permutations, activation, layer)
    return MixingMlp((widths[0], widths[1], widths[2]), permutations, activation, layer)
