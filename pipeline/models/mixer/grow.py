"""The blocks of a Mixer for images K times as large, from those of one for small images: `Mixer.grown`.

`copies` (Tolstikhin et al. 2021, appendix): the larger image is K x K sub-images, and the token-mixing layers
become block-diagonal with a copy for each, D_S and the hidden biases K^2 times as many. At first the network does
on each sub-image what the small one did. `bilinear`: D_S stays, the filters over the token grid are interpolated,
and those of the first layer are divided by K^2 so that their response to constant features is unchanged.

Positions of copies are index vectors [K^2, n]: row k has those of sub-image k's n tokens or entries in the large
network.
"""

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from widemix.models.mixer.blocks import MixerBlock, TokenSkip
from widemix.models.mixer.section import MixerSection
from widemix.models.permutation import Permute
from widemix.models.pk_layers import Mixing

Method = Literal["copies", "bilinear"]


def grow_blocks(
    small: Sequence[MixerBlock],
    grown: Sequence[MixerBlock],
    section: MixerSection,
    grid: tuple[int, int],
    factor: int,
    method: Method,
) -> None:
    """Give the blocks `grown` of a `section` the weights that the blocks `small` on a grid h x w lead to."""
    parts, raster = factor**2, raster_positions(*grid, factor)
    # The order of projected tokens is sub-image after sub-image.
    consecutive = consecutive_positions(parts, section.project_tokens // parts) if section.project_tokens else raster
    for number, (old, new) in enumerate(zip(small, grown, strict=True)):
        if method == "bilinear":
            _stretch(old.mlp_tokens, new.mlp_tokens, grid, factor)
        else:
            _copy(old, new, into=raster if number == 0 else consecutive, out=consecutive)


def raster_positions(height: int, width: int, factor: int) -> Tensor:
    """Positions of each sub-image's tokens among the large image's, read row by row: [K^2, height*width]."""
    large = torch.arange(factor * height * factor * width).view(factor, height, factor, width)
    return large.transpose(1, 2).reshape(factor**2, height * width)


def consecutive_positions(parts: int, size: int) -> Tensor:
    """Positions of sub-images one after the other: [parts, size]."""
    return torch.arange(parts * size).view(parts, size)


def _copy(old: MixerBlock, new: MixerBlock, into: Tensor, out: Tensor) -> None:
    """Block-diagonal copies of the layers along tokens, and copies of the block's permutations.

    into, out: positions of the tokens before and after the block's token mixing.
    """
    if isinstance(old.skip, TokenSkip):
        _copy_layer(old.skip.fc, cast(TokenSkip, new.skip).fc, into, out)
    parts, tokens = out.shape
    small, large = layers(old.mlp_tokens), layers(new.mlp_tokens)
    channels = layers(old.mlp_channels)[0].in_features
    permuted = isinstance(old.mlp_tokens.permute_in, Permute)  # then it, not the first layer, finds the tokens
    ends = [into, *[consecutive_positions(parts, layer.out_features) for layer in small[:-1]], out]
    if permuted:
        ends[0], ends[-1] = consecutive_positions(parts, into.shape[1]), consecutive_positions(parts, tokens)
    for number, (one, other) in enumerate(zip(small, large, strict=True)):
        _copy_layer(one, other, ends[number], ends[number + 1])
    _copy_permutations(
        old.mlp_tokens,
        new.mlp_tokens,
        outside=(_features(into, channels), _features(out, channels)),
        rows=(_rows(channels, parts, into.shape[1]), _rows(channels, parts, tokens)),
        hidden=[_rows(channels, parts, layer.out_features) for layer in small[:-1]],
    )
    consecutive = consecutive_positions(parts, tokens)
    _copy_permutation(old.skip, new.skip, _features(into, channels), _features(out, channels))
    _copy_permutation(old.channel_skip, new.channel_skip, _features(out, channels), _features(out, channels))
    _copy_permutations(
        old.mlp_channels,
        new.mlp_channels,
        outside=(_features(out, channels), _features(out, channels)),
        rows=(_features(consecutive, channels), _features(consecutive, channels)),
        hidden=[_features(consecutive, layer.out_features) for layer in layers(old.mlp_channels)[:-1]],
    )


def layers(mixing: Mixing) -> list[nn.Linear]:
    """The linear layers of a mixing, first to last."""
    return cast(list[nn.Linear], [step.layer for step in mixing.steps()])


def _copy_layer(small: nn.Linear, large: nn.Linear, into: Tensor, out: Tensor) -> None:
    large.weight.zero_()
    for columns, rows in zip(into, out, strict=True):
        large.weight[..., rows[:, None], columns] = small.weight  # of every group, if there are any
        if small.bias is not None:
            large.bias[..., rows] = small.bias


def _features(positions: Tensor, width: int) -> Tensor:
    """Positions of the entries of tokens of `width` features: [K^2, S] -> [K^2, S*width]."""
    return (positions[:, :, None] * width + torch.arange(width)).flatten(1)


def _rows(channels: int, parts: int, size: int) -> Tensor:
    """Positions of the entries of rows, one per channel, of `size` tokens of each sub-image after the other."""
    within = consecutive_positions(parts, size)[:, None, :]
    return (torch.arange(channels)[None, :, None] * parts * size + within).flatten(1)


def _copy_permutations(
    old: Mixing, new: Mixing, outside: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor], hidden: list[Tensor]
) -> None:
    """outside: entries of the features before and after; rows, hidden: entries of the layers' inputs and outputs."""
    _copy_permutation(old.permute_in, new.permute_in, source=outside[0], target=rows[0])
    _copy_permutation(old.permute_out, new.permute_out, source=rows[1], target=outside[1])
    for one, other, inside in zip(old.steps()[:-1], new.steps()[:-1], hidden, strict=True):
        _copy_permutation(one.outward, other.outward, source=inside, target=inside)


def _copy_permutation(old: nn.Module, new: nn.Module, source: Tensor, target: Tensor) -> None:
    if isinstance(old, Permute) and isinstance(new, Permute):
        new.index[target] = source[:, old.index.long()].to(new.index.dtype)


def _stretch(old: Mixing, new: Mixing, grid: tuple[int, int], factor: int) -> None:
    """Filters over the h x w grid become filters over the K*h x K*w grid."""

    def over_grid(rows: Tensor) -> Tensor:  # [n, h*w] -> [n, K*h * K*w]
        maps = rows.view(-1, 1, *grid)
        return interpolate(maps, scale_factor=factor, mode="bilinear", align_corners=False).flatten(1)

    reads, writes = layers(old)[0].weight, layers(old)[-1].weight
    if reads is writes:
        layers(new)[0].weight.copy_(over_grid(over_grid(reads / factor**2).T.contiguous()).T)
    else:
        layers(new)[0].weight.copy_(over_grid(reads / factor**2))
        layers(new)[-1].weight.copy_(over_grid(writes.T.contiguous()).T)
    layers(new)[-1].bias.copy_(over_grid(layers(old)[-1].bias[None])[0])
