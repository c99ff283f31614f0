"""Which layers each family's network has, stem to head."""

from dataclasses import replace
from functools import singledispatch
from itertools import pairwise

import numpy as np

from pipeline.models.kronecker import split
from pipeline.models.lasso import HIDDEN, KERNEL, places
from pipeline.models.layers import Dense, Network, Norm
from pipeline.models.sparse import row_counts
from pipeline.recipe.family import Family, hidden_width
from pipeline.recipe.model import LassoSection, MixerSection, ShallowSection, SwMlpSection
from pipeline.recipe.relatives import FfOnlySection, PatchedSection, PermutatorSection, RepMlpSection
from pipeline.recipe.text import TextMixerSection, TextTransformerSection


@singledispatch
def describe(section: Family, image_size: int, num_classes: int) -> Network:
    """Every layer of the section's network, stem to head."""
    raise NotImplementedError(type(section).__name__)


@describe.register
def _(section: MixerSection, image_size: int, num_classes: int) -> Network:
    tokens, channels = section.tokens, section.channels
    own_tokens = (image_size // section.patch_size) ** 2
    token_hidden, channel_hidden = section.hidden_widths
    layers = [_stem(section, image_size)]
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
    if section.kind == "s_fc":
        opening = Dense(1, 3 * image_size**2, first, bias=False, input_gradient=False)
    else:
        opening = Dense(spots, 3 * KERNEL**2, section.base_channels, matrices=spots, bias=False, input_gradient=False)
    layers = [
        opening,
        Dense(1, first, width, bias=False),
        Dense(1, width, num_classes, mixes=False),
    ]
    norms = [Norm(1, first, statistics=0), Norm(1, width, statistics=0)]
    return Network(layers, norms, width=first, gamma=1.0)


@describe.register
def _(section: FfOnlySection, image_size: int, num_classes: int) -> Network:
    channels = section.channels
    patches = (image_size // section.patch_size) ** 2
    tokens = patches + 1  # the class token
    layers = [_stem(section, image_size)]
    for _ in range(section.depth):
        layers += _mlp(tokens, channels, round(section.expansion * channels), channels)
        layers += _mlp(channels, tokens, round(section.expansion * tokens), tokens)
    norms = [Norm(tokens, channels), Norm(channels, tokens)] * section.depth + [Norm(tokens, channels)]
    return Network(
        [*layers, Dense(1, channels, num_classes, mixes=False)],
        norms,
        width=tokens * channels,
        extra_parameters=channels + tokens * channels,
        extra_kept=patches * channels,  # the head reads the class token out of all that the last norm made
        tokens=tokens,
        channels=channels,
    )


@describe.register
def _(section: PermutatorSection, image_size: int, num_classes: int) -> Network:
    channels, tokens = section.channels, (image_size // section.patch_size) ** 2
    block = [Dense(tokens, channels, channels, bias=False)] * 3
    block += [Dense(1, channels, channels // 4, mixes=False, activated=True)]
    block += [Dense(1, channels // 4, 3 * channels, mixes=False), Dense(tokens, channels, channels)]
    block += _mlp(tokens, channels, round(section.expansion * channels), channels)
    return Network(
        [_stem(section, image_size), *block * section.depth, Dense(1, channels, num_classes, mixes=False)],
        [Norm(tokens, channels)] * (2 * section.depth + 1),
        width=tokens * channels,
        extra_kept=section.depth * (3 * tokens * channels + 3 * channels),  # the three branches and their shares
        tokens=tokens,
        channels=channels,
    )


@describe.register
def _(section: RepMlpSection, image_size: int, num_classes: int) -> Network:
    """In the training form; the convolutions beside the mixing do not count as connections, being fused away."""
    channels, tokens, sets = section.channels, (image_size // section.patch_size) ** 2, section.share_sets
    hidden = round(section.expansion * channels)
    of_set = Norm(channels * tokens // sets, sets, statistics=0)
    block = [Dense(1, channels, channels // 4, mixes=False), Dense(1, channels // 4, channels, mixes=False)]
    block += [Dense(channels, tokens, tokens, matrices=sets, bias=False)]
    spots = channels * tokens
    block += [
        Dense(spots, side**2, 1, matrices=sets, bias=False, mixes=False, keeps_input=False)
        for side in section.kernels
    ]
    block += [Dense(tokens, channels, hidden, bias=False), Dense(tokens, hidden, channels, bias=False)]
    norms = [of_set] * (1 + len(section.kernels))
    norms += [Norm(tokens, width, statistics=0) for width in (channels, channels, hidden, channels)]
    return Network(
        [_stem(section, image_size), *block * section.depth, Dense(1, channels, num_classes, mixes=False)],
        [*norms * section.depth, Norm(tokens, channels)],
        width=spots,
        extra_kept=section.depth * (spots + channels + tokens * hidden),  # what gate and GELU multiply
        tokens=tokens,
        channels=channels,
    )


@describe.register
def _(section: TextMixerSection, image_size: int, num_classes: int) -> Network:
    tokens, width = section.tokens, section.width
    block = _mlp(width, tokens, hidden_width(section.expansion, tokens), tokens)
    block += _mlp(tokens, width, hidden_width(section.expansion, width), width)
    norms = [Norm(tokens, width)] * (2 * section.depth + 1) if section.norm == "layer" else []
    return Network(
        [*block * section.depth, Dense(1, width, num_classes, mixes=False)],
        norms,
        width=tokens * width,
        extra_parameters=section.vocabulary * width,
        extra_kept=4 * tokens,  # ids of 64 bits, the mask, shares of the mean
        tokens=tokens,
        channels=width,
    )


@describe.register
def _(section: TextTransformerSection, image_size: int, num_classes: int) -> Network:
    """With PyTorch's flash attention, whose backward pass takes two and a half times the products of the forward."""
    tokens, width, depth = section.tokens, section.width, section.depth
    block = [Dense(tokens, width, 3 * width), Dense(tokens, width, width)]
    block += _mlp(tokens, width, hidden_width(section.expansion, width), width)
    of_attention = 3 * tokens * width + 2 * section.heads * tokens  # queries, keys, values, log-sums, the mask
    return Network(
        [*block * depth, Dense(1, width, num_classes, mixes=False)],
        [Norm(tokens, width)] * (2 * depth + 1),
        width=tokens * width,
        extra_parameters=(section.vocabulary + tokens) * width,
        extra_kept=3 * tokens + depth * of_attention,
        extra_forward=4 * depth * tokens**2 * width,
        extra_backward=10 * depth * tokens**2 * width,
        tokens=tokens,
        channels=width,
    )


def _stem(section: PatchedSection | MixerSection, image_size: int) -> Dense:
    patches = (image_size // section.patch_size) ** 2
    return Dense(patches, 3 * section.patch_size**2, section.channels, mixes=False, input_gradient=False)


def _matrix(kind: str, inputs: int, outputs: int) -> list[Dense]:
    if kind == "dense":
        return [Dense(1, inputs, outputs, bias=False)]
    (rows, columns), (out_rows, out_columns) = split(inputs), split(outputs)
    shared = kind == "kronecker"
    return [
        Dense(rows, columns, out_columns, matrices=1 if shared else rows, bias=False),
        Dense(out_columns, rows, out_rows, matrices=1 if shared else out_columns, bias=False),
    ]


def _mlp(rows: int, inputs: int, hidden: int | None, outputs: int) -> list[Dense]:
    if hidden is None:
        return [Dense(rows, inputs, outputs, activated=True)]
    return [Dense(rows, inputs, hidden, activated=True), Dense(rows, hidden, outputs)]
