"""What a network costs, by formula: no tensor is made. Exact against counted modules and PyTorch's FLOP counter.

A network is a list of layers. FLOPs are two a multiply-add, of products alone (norms, activations and permutations
are left out), as `torch.utils.flop_counter` counts them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from itertools import pairwise

import numpy as np

from pipeline.models.kronecker import split
from pipeline.models.lasso import HIDDEN, KERNEL, places
from pipeline.models.sparse import row_counts
from pipeline.recipe.model import Family, LassoSection, MixerSection, ShallowSection, SwMlpSection

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Dense:
    """I_rows (x) W: one layer applied to each of `rows` rows, and what it leaves in memory for the backward pass."""

    rows: int
    inputs: int
    outputs: int
    nonzero: int | None = None  # weights that are there, where a mask or a structure leaves some out
    shared: bool = True  # False: every row has a matrix of its own
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
        return self.weights * (1 if self.shared else self.rows) + self.bias * self.outputs

    @property
    def connections(self) -> int:
        """Nonzero entries of the effective matrix."""
        return self.rows * self.weights

    @property
    def entries(self) -> int:
        """All entries of the effective matrix."""
        return self.rows**2 * self.inputs * self.outputs

    @property
    def products(self) -> int:
        """Matrix products of this size in a forward and a backward pass."""
        return 2 + self.input_gradient

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
    gamma: float | None = None  # None: the one that gives Omega at these S and C
    tokens: int = 1
    channels: int = 1


@dataclass(frozen=True)
class ModelCost:
    """The cost of a network. Effective quantities are of the wide, sparse MLP that it is."""

    parameters: int
    connections: int  # nonzero entries of all effective mixing matrices (stem, skip W and head left out)
    omega: float  # Omega, mean connections of a mixing layer (equation 14)
    gamma: float  # expansion; of a Mixer the one that gives this Omega at its S and C: Omega / (m (S + C) / 2)
    width: int  # m, effective width of the features: S*C of a Mixer
    hidden_width: float  # gamma * m, effective width of the hidden features
    density: float  # p, nonzero share of the effective mixing matrices
    forward_flops: int  # a picture
    training_flops: int  # a picture, forward and backward
    activation_bytes: (
        int  # a picture, in fp32: what PyTorch keeps for the backward pass; GELU and LN keep their inputs
    )


def model_cost(section: Family, image_size: int, num_classes: int) -> ModelCost:
    """The cost of `build_model(section, image_size, num_classes)` on 3-channel pictures, without building it."""
    network = describe(section, image_size, num_classes)
    mixing = [layer for layer in network.layers if layer.mixes]
    connections = sum(layer.connections for layer in mixing)
    omega = connections / len(mixing)
    gamma = network.gamma
    if gamma is None:
        gamma = 2 * omega / (network.width * (network.tokens + network.channels))
    parts: list[Dense | Norm] = [*network.layers, *network.norms]
    return ModelCost(
        parameters=sum(part.parameters for part in parts),
        connections=connections,
        omega=omega,
        gamma=gamma,
        width=network.width,
        hidden_width=gamma * network.width,
        density=connections / sum(layer.entries for layer in mixing),
        forward_flops=sum(2 * layer.connections for layer in network.layers),
        training_flops=sum(2 * layer.connections * layer.products for layer in network.layers),
        activation_bytes=FLOAT * sum(part.kept for part in parts),
    )


@singledispatch
def describe(section: Family, image_size: int, num_classes: int) -> Network:
    """Every layer of the section's network, stem to head."""
    raise NotImplementedError(type(section).__name__)


@describe.register
def _(section: MixerSection, image_size: int, num_classes: int) -> Network:
    tokens, channels = section.tokens, section.channels
    own_tokens = (image_size // section.patch_size) ** 2
    token_hidden, channel_hidden = section.hidden_widths
    layers = [Dense(own_tokens, 3 * section.patch_size**2, channels, mixes=False, input_gradient=False)]
    norms = [Norm(own_tokens, channels)] + [Norm(tokens, channels)] * (2 * section.depth)
    if section.project_tokens:
        # Its input is kept already: by the norm before the token mixing, or by an unpermuted token mixing itself.
        permuted = section.permutation == "random" and section.permuted_mixings != "channel"
        permuted = permuted and (section.permuted_blocks is None or 0 in section.permuted_blocks)
        own_copy = section.norm == "none" and permuted
        layers.append(Dense(channels, own_tokens, tokens, bias=False, mixes=False, keeps_input=own_copy))
        norms.append(Norm(tokens, channels))
    for block in range(section.depth):
        layers += _mlp(channels, own_tokens if block == 0 else tokens, token_hidden, tokens)
        layers += _mlp(tokens, channels, channel_hidden, channels)
    layers.append(Dense(1, channels, num_classes, mixes=False))
    if section.norm == "none":
        norms = []
    return Network(layers, norms, width=tokens * channels, tokens=tokens, channels=channels)


@describe.register
def _(section: SwMlpSection, image_size: int, num_classes: int) -> Network:
    width = section.width
    widths = (width, width) if section.expansion is None else (width, section.hidden_width, width)
    layers = [Dense(1, 3 * image_size**2, width, mixes=False, input_gradient=False)]
    for block in range(section.depth):
        for place, (inputs, outputs) in enumerate(pairwise(widths)):
            generator = np.random.default_rng((section.mask_seed, block, place))
            nonzero = int(row_counts(outputs, inputs, section.density, generator).sum())
            layers.append(Dense(1, inputs, outputs, nonzero, activated=place == 0))
    layers.append(Dense(1, width, num_classes, mixes=False))
    return Network(layers, [Norm(1, width)] * (section.depth + 1), width=width, gamma=section.expansion or 1.0)


@describe.register
def _(section: ShallowSection, image_size: int, num_classes: int) -> Network:
    pixels, width = 3 * image_size**2, section.width
    first = _matrix(section.matrices, pixels, width)
    first[0] = replace(first[0], input_gradient=False)
    layers = [*first, *_matrix(section.matrices, width, width), Dense(1, width, num_classes, mixes=False)]
    return Network(layers, [], width=width, gamma=1.0)


@describe.register
def _(section: LassoSection, image_size: int, num_classes: int) -> Network:
    spots, width = places(image_size), HIDDEN * section.base_channels
    first = spots * section.base_channels
    opening = {"shared": False, "bias": False, "input_gradient": False}
    layers = [
        Dense(1, 3 * image_size**2, first, **opening)
        if section.kind == "s_fc"
        else Dense(spots, 3 * KERNEL**2, section.base_channels, **opening),
        Dense(1, first, width, bias=False),
        Dense(1, width, num_classes),
    ]
    norms = [Norm(1, first, statistics=0), Norm(1, width, statistics=0)]
    return Network(layers, norms, width=first, gamma=1.0)


def _matrix(kind: str, inputs: int, outputs: int) -> list[Dense]:
    if kind == "dense":
        return [Dense(1, inputs, outputs, bias=False)]
    (rows, columns), (out_rows, out_columns) = split(inputs), split(outputs)
    shared = kind == "kronecker"
    return [
        Dense(rows, columns, out_columns, shared=shared, bias=False),
        Dense(out_columns, rows, out_rows, shared=shared, bias=False),
    ]


def _mlp(rows: int, inputs: int, hidden: int | None, outputs: int) -> list[Dense]:
    if hidden is None:
        return [Dense(rows, inputs, outputs, activated=True)]
    return [Dense(rows, inputs, hidden, activated=True), Dense(rows, hidden, outputs)]
