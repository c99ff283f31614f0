"""Separation ranks of small networks with polynomial activations: `widemix analyse separation-rank`.

The separation rank of a function y(a, b) is the least number of products g(a) h(b) whose sum it is (Navon &
Bronstein 2023, section 4), and so the rank of the matrix y(a_i, b_j) over enough points. Weights and points are
random numbers of a prime field, in which nothing is rounded. A rank found there is never above that of the best
weights, of which the theorems speak, and is below it only where a determinant is 0 by chance, once in 2^31 times.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from widemix.errors import InputError
from widemix.models.layer_costs import NetworkCost
from widemix.models.mixer.blocks import MixerBlock, mixer_blocks
from widemix.models.mixer.section import MixerSection
from widemix.models.pk_layers import Square
from widemix.plots.style import COLORS, new_figure, styled
from widemix.recipe import Recipe

PRIME = 2**31 - 1  # products of two numbers below it are exact in int64
Partition = Literal["tokens", "channels"]
Layers = Callable[[Tensor], list[Tensor]]  # [B, n, m] -> the features after each layer, all in [0, PRIME)
_CHUNK = 1 << 18  # inputs that are computed at once
# Of a Mixer whose ranks are computed: polynomial, of plain matrices.
_POLYNOMIAL = {"activation": "square", "norm": "none", "token_groups": 1}
_POLYNOMIAL |= {"token_weights": "dense", "channel_weights": "dense"}


@dataclass(frozen=True)
class SeparationRank:
    """Least and greatest rank of the outputs of a network after `layers` layers; None where all points were too few.

    monomials: the rank that no polynomial of this degree exceeds, whatever the network.
    """

    layers: int
    least: int | None
    greatest: int | None
    monomials: int


def mixer_layers(recipe: Recipe, residuals: bool, seed: int) -> tuple[Layers, tuple[int, int]]:
    """The blocks of a Mixer's recipe on a grid of its n tokens and m channels, with random weights and no biases.

    A block has two layers: its token mixing and its channel mixing. Raises `InputError` for a network that is no
    polynomial.
    """
    section = getattr(recipe.model, "mixer", recipe.model)  # of a text_mixer its blocks'
    if not isinstance(section, MixerSection):
        raise InputError(
            f"model.kind {recipe.model.kind}: is no Mixer; a recipe of a mixer, s_mixer or text_mixer is"
        )
    for name, value in _POLYNOMIAL.items():
        if (found := getattr(section, name)) != value:
            raise InputError(f"model.{name} {found}: the separation rank is that of a polynomial; set it to {value}")
    tokens = cast(NetworkCost, recipe.model.layer_costs(recipe.data.image_size, 1)).tokens
    blocks = mixer_blocks(section.model_copy(update={"project_tokens": None}), tokens).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, layer in list(blocks.named_modules()):
        if isinstance(layer, nn.Linear):
            blocks.set_submodule(name, _Linear(layer.out_features, layer.in_features, generator))
        elif isinstance(layer, MixerBlock) and not residuals:
            layer.skip, layer.channel_skip = _Zero(), _Zero()
    for module in blocks.modules():
        if isinstance(module, Square):
            module.register_forward_hook(lambda _, inputs, output: output % PRIME)

    def layers(x: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        for block in cast(list[MixerBlock], list(blocks)):
            handle = block.norm2.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0] % PRIME))
            try:
                x = block(x) % PRIME
            finally:
                handle.remove()
            found.append(x)
        return found

    return layers, (tokens, section.channels)


def attention_layers(depth: int, channels: int, heads: int, seed: int) -> Layers:
    """Attention without softmax, residuals and biases, of which theorem 5.7 speaks: sum_h X A_h X^T X V_h."""
    generator = torch.Generator().manual_seed(seed)
    weights = [
        [[_Linear(channels, channels, generator) for _ in range(2)] for _ in range(heads)] for _ in range(depth)
    ]

    def layers(x: Tensor) -> list[Tensor]:
        found = []
        for layer in weights:
            of_heads = [_times(_times(query(x), x.mT), value(x)) for query, value in layer]
            x = torch.stack(of_heads).sum(0) % PRIME
            found.append(x)
        return found

    return layers


class _Linear(nn.Module):
    """A linear layer of random weights of the field, without a bias."""

    def __init__(self, outputs: int, inputs: int, generator: torch.Generator):
        super().__init__()
        self.weight = torch.randint(1, PRIME, (outputs, inputs), generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product in the field."""
        return _times(x, self.weight.mT)


class _Zero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Return zeros of this shape."""
        return torch.zeros_like(x)


def _times(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product in the field."""
    total = torch.zeros(1, dtype=torch.int64)
    for k in range(a.shape[-1]):
        total = (total + a[..., :, k, None] * b[..., k, None, :]) % PRIME
    return total


def separation_ranks(
    layers: Layers,
    size: tuple[int, int],
    degree: int,
    partition: Partition = "tokens",
    most: int = 512,
    seed: int = 0,
) -> list[SeparationRank]:
    """The ranks after each layer, the first half of the tokens, or channels, being a, the others b.

    size: n and m. degree: of one layer as a polynomial. most: points of each side. Ends with the first layer whose
    ranks take more points.
    """
    found: list[SeparationRank] = []
    points, depth = 16, 1
    first, second = _split(size, partition)
    while True:
        outputs = _values(layers, size, partition, points, seed)
        for number in range(depth, len(outputs) + 1):
            ranks = [rank(matrix) for matrix in outputs[number - 1]]
            if max(ranks) == points and points < most:
                break
            known = max(ranks) < points
            bound = monomials(degree**number, first, second)
            least, greatest = (min(ranks), max(ranks)) if known else (None, None)
            found.append(SeparationRank(number, least, greatest, bound))
            if not known:
                return found
        depth = len(found) + 1
        if depth > len(outputs):
            return found
        points = min(2 * points, most)


def _split(size: tuple[int, int], partition: Partition) -> tuple[int, int]:
    """How many of the inputs are in a and in b."""
    tokens, channels = size
    if partition == "tokens":
        return tokens // 2 * channels, (tokens - tokens // 2) * channels
    return tokens * (channels // 2), tokens * (channels - channels // 2)


def _values(layers: Layers, size: tuple[int, int], partition: Partition, points: int, seed: int) -> list[np.ndarray]:
    """After each layer the value of each output at all pairs of points: [n m, points, points]."""
    generator = torch.Generator().manual_seed(seed + 1)
    a, b = (torch.randint(0, PRIME, (points, *size), generator=generator) for _ in range(2))
    of_a = torch.zeros(size, dtype=torch.bool)
    of_a[(slice(size[0] // 2),) if partition == "tokens" else (slice(None), slice(size[1] // 2))] = True
    rows, chunks = max(1, _CHUNK // (points * math.prod(size))), []
    for start in range(0, points, rows):
        x = torch.where(of_a, a[start : start + rows, None], b[None])
        with torch.no_grad():
            outputs = layers(x.flatten(0, 1))
        chunks.append([y.flatten(1).T.reshape(-1, len(x), points) for y in outputs])
    return [torch.cat(parts, 1).numpy() for parts in zip(*chunks, strict=True)]


def rank(matrix: np.ndarray) -> int:
    """The rank of a matrix of whole numbers in the prime field, by elimination."""
    rest, found = np.asarray(matrix, np.int64) % PRIME, 0
    for column in range(rest.shape[1]):
        pivots = np.flatnonzero(rest[:, column])
        if not len(pivots):
            continue
        row = rest[pivots[0], column:] * pow(int(rest[pivots[0], column]), -1, PRIME) % PRIME
        others = pivots[1:]
        rest[others, column:] = (rest[others, column:] - rest[others, column, None] * row) % PRIME
        rest = np.delete(rest, pivots[0], axis=0)
        found += 1
    return found


def monomials(degree: int, first: int, second: int) -> int:
    """The rank that no polynomial of this degree in so many variables of a and of b exceeds.

    Its coefficients are a matrix, a row for each monomial of a and a column for each of b. For any k all lie in the
    rows of degree up to k and the columns of degree below that of the polynomial less k.
    """

    def count(variables: int, most: int) -> int:
        return math.comb(variables + most, variables) if most >= 0 else 0

    return min(count(first, k) + count(second, degree - k - 1) for k in range(degree + 1))


@styled
def plot_ranks(
    measured: Mapping[str, Sequence[SeparationRank]], bounds: Mapping[str, Sequence[float]], title: str
) -> Any:
    """Return the figure: log3 of the ranks by the number of layers, and bounds, given as log3 from one layer on."""
    figure, axes = new_figure(6.4, 4.2)
    for number, (name, values) in enumerate(measured.items()):
        known = [(each.layers, math.log(each.greatest, 3)) for each in values if each.greatest]
        axes.plot(*zip(*known, strict=True), "os"[number % 2] + "-", label=f"{name}, measured")
        axes.plot(*_most(values), ":", color=COLORS[number], label=f"{name}, most of its degree")
    for name, logarithms in bounds.items():
        axes.plot(range(1, len(logarithms) + 1), logarithms, "--", color="0.55", linewidth=1)
        end = (len(logarithms), logarithms[-1])
        axes.annotate(name, end, (-4, 4), textcoords="offset points", ha="right", color="0.4")
    axes.set(xlabel="layers p", ylabel="log₃ of the separation rank", title=title)
    axes.set_yscale("symlog", linthresh=math.log(2, 3))  # a rank of 1 is at 0
    axes.set_xticks(range(1, max(map(len, bounds.values())) + 1))
    axes.legend(fontsize=8)
    return figure


def _most(values: Sequence[SeparationRank]) -> tuple[list[int], list[float]]:
    return [each.layers for each in values], [math.log(each.monomials, 3) for each in values]
