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
from widemix.models.mixer.section import MIXINGS, MixerSection, MixingKind
from widemix.models.permutation import Permute, Transpose
from widemix.models.structured import StructuredLinear, linear_of

Layer = nn.Linear | GroupedLinear | StructuredLinear
MakeLayer = Callable[[int, int], Layer]


class Permutations(NamedTuple):
    """The permutations before, inside (before phi) and after the layers of one mixing."""

    inward: nn.Module
    hidden: nn.Module
    outward: nn.Module


def mixing_permutations(
    section: MixerSection, block: int, kind: MixingKind, widths: Sequence[int], tokens_in: int
) -> Permutations:
    """Return a mixing's permutations: a Mixer's own, or independent random ones, frozen and saved with the weights.

    `widths` are those of the layers on a row, first to last, `tokens_in` the tokens that the block reads; the output
    is in rows of channels. With `permuted_layers: each` the hidden features are permuted too (section 5.2), else only
    input and output (appendix A.2.3). Between two layers there is one permutation, the product of theirs, since phi
    commutes with it.
    """
    if not section.is_permuted(block, kind):
        outer = Transpose if kind == "token" else nn.Identity  # rows of channels -> rows of tokens -> of channels
        return Permutations(outer(), nn.Identity(), outer())
    rows = section.channels if kind == "token" else tokens_in
    key = (section.permutation_seed, block, MIXINGS.index(kind))
    first, *hidden, last = widths
    inward = Permute(permutation.random(rows * first, (*key, 0)), columns=first)
    outward = Permute(permutation.random(rows * last, (*key, 1)), columns=section.channels)
    inside: nn.Module = nn.Identity()
    if section.permuted_layers == "each" and hidden:
        inside = Permute(permutation.random(rows * hidden[0], (*key, 2)), columns=hidden[0])
    return Permutations(inward, inside, outward)


class Step(NamedTuple):
    """A layer of a mixing, its name there, and the permutations that no activation separates from it."""

    name: str
    inward: nn.Module
    layer: Layer
    outward: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        """Apply it without its bias: [B, n, d] -> [B, n', d']."""
        x = self.inward(x)
        if isinstance(self.layer, nn.Linear):
            return self.outward(x @ self.layer.weight.T)
        if isinstance(self.layer, StructuredLinear):
            return self.outward(self.layer.product(x))
        return self.outward(self.layer.product(x, torch.zeros_like(self.layer.bias)))


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
        self, widths: Sequence[int], permutations: Permutations, activation: str, layer: MakeLayer = nn.Linear
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

    def steps(self) -> list[Step]:
        """Its layers, first to last."""
        return [Step("fc", self.permute_in, self.fc, self.permute_out)]


class MixingMlp(nn.Module):
    """J_out (I (x) W2) phi(J_hidden (I (x) W1) J_in x): the MLP-Mixer's two-layer mixing, [B, S0, C] -> [B, S, C]."""

    def __init__(
        self, widths: Sequence[int], permutations: Permutations, activation: str, layer: MakeLayer = nn.Linear
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

    def steps(self) -> list[Step]:
        """Its layers, first to last."""
        first = Step("fc1", self.permute_in, self.fc1, self.permute_hidden)
        return [first, Step("fc2", nn.Identity(), self.fc2, self.permute_out)]


def _rows(x: Tensor) -> Tensor:
    """The same entries in a row of memory: the product, which would copy them too, then adds the bias itself."""
    return x.contiguous()


Mixing = MixingLayer | MixingMlp


def mixing(section: MixerSection, block: int, kind: MixingKind, tokens_in: int) -> Mixing:
    """Return a mixing of a block, from 0, a layer or an MLP on each row: [B, tokens_in, C] -> [B, S, C]."""
    widths = section.mixing_widths(kind, tokens_in)
    layer: MakeLayer = linear_of(section.structure(kind))
    if kind == "token" and section.token_groups > 1:
        layer = partial(GroupedLinear, section.token_groups)
    make = MixingLayer if len(widths) == 2 else MixingMlp
    return make(widths, mixing_permutations(section, block, kind, widths, tokens_in), section.activation, layer)
