"""Blocks of MLP-Mixers and S-Mixers (Tolstikhin et al. 2021; Hayase & Karakida 2024), with any permutations.

Shapes: B batch, S tokens, C channels, S0 tokens before the first block, D hidden width of a mixing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from widemix.models import permutation
from widemix.models.batch_last import block as batch_last
from widemix.models.drop_path import DropPath, drop_path
from widemix.models.factors import Rank, Structure, Weights
from widemix.models.layers import GroupedLinear, LayerNorm
from widemix.models.permutation import Permute, Transpose
from widemix.models.pk import (
    MakeLayer,
    Mixing,
    MixingLayer,
    MixingMlp,
    Permutations,
    Square,
    channel_permutations,
    mixing,
    random_permutations,
    token_permutations,
)
from widemix.models.structured import STRUCTURED, linear_of

NORMS: dict[str, Callable[..., nn.Module]] = {"layer": LayerNorm, "none": nn.Identity}


@dataclass(frozen=True)
class MixerShape:
    """Everything about the blocks of a Mixer except the number of its input tokens.

    token_hidden, channel_hidden: D_S and D_C, or None for the single layers of the S-Mixer.
    tokens: S. None keeps the input tokens; a number gives the first block the skip LN(W X), even where S = S0.
    permutation: commutation is the normal Mixer, random the RP Mixer, keyed by `permutation_seed`.
    permuted_blocks: the blocks to permute, from 0; None is all. permuted_mixings: which of their mixings.
    permuted_layers: around each mixing (appendix A.2.3), or around each of its two layers (section 5.2).
    permuted_skips: the skips have random permutations too (Navon & Bronstein 2023, equation 3).
    token_groups: G groups of channels, each with a token mixing of its own; 1: shared by all, C: untied.
    token_weights, channel_weights: the structures of the mixings' matrices; rank, blocks: see `factors.Structure`.
    activation, norm: gelu and layer; square and none are the Mixer of Navon & Bronstein 2023, equation 3.
    """

    channels: int
    depth: int
    token_hidden: int | None
    channel_hidden: int | None
    tokens: int | None = None
    permutation: Literal["commutation", "random"] = "commutation"
    permutation_seed: int = 0
    permuted_blocks: Sequence[int] | None = None
    permuted_mixings: Literal["token", "channel", "both"] = "both"
    permuted_layers: Literal["mixing", "each"] = "mixing"
    permuted_skips: bool = False
    token_groups: int = 1
    token_weights: Weights = "dense"
    channel_weights: Weights = "dense"
    rank: Rank | None = None
    blocks: int | None = None
    activation: Literal["gelu", "gelu_tanh", "square"] = "gelu"
    norm: Literal["layer", "none"] = "layer"
    norm_eps: float = 1e-6
    drop_path_rate: float = 0.0

    def token_mixing(self, block: int, tokens_in: int) -> Mixing:
        """The mixing of block `block` along tokens, [B, tokens_in, C] -> [B, S, C]."""
        widths = _widths(tokens_in, self.token_hidden, self.tokens or tokens_in)
        permutations = token_permutations()
        if self._permutes(block, "token"):
            permutations = self._random(self.channels, widths, (block, 0))
        layer: MakeLayer = partial(GroupedLinear, self.token_groups)
        if self.token_groups == 1:
            layer = linear_of(Structure(self.token_weights, self.rank, self.blocks))
        return mixing(widths, permutations, self.activation, layer)

    def channel_mixing(self, block: int, tokens: int) -> Mixing:
        """The mixing of block `block` along channels, [B, S, C] -> [B, S, C]."""
        widths = _widths(self.channels, self.channel_hidden, self.channels)
        permutations = channel_permutations()
        if self._permutes(block, "channel"):
            permutations = self._random(tokens, widths, (block, 1))
        layer = linear_of(Structure(self.channel_weights, self.rank, self.blocks))
        return mixing(widths, permutations, self.activation, layer)

    def skip(self, block: int, tokens_in: int) -> nn.Module:
        """The skip around a block's token mixing, [B, tokens_in, C] -> [B, S, C]."""
        if self.tokens is not None and block == 0:
            return TokenSkip(tokens_in, self.tokens, self.norm_layer(self.channels))
        return self.permuted_skip(block, tokens_in, "token")

    def permuted_skip(self, block: int, tokens: int, mixing: Literal["token", "channel"]) -> nn.Module:
        """pi_r, the permutation of a mixing's skip: [B, tokens, C] -> [B, tokens, C]."""
        if not (self.permuted_skips and self._permutes(block, mixing)):
            return nn.Identity()
        key = (self.permutation_seed, block, 2 if mixing == "token" else 3)
        return Permute(permutation.random(tokens * self.channels, key), columns=self.channels)

    @property
    def norm_layer(self) -> Callable[..., nn.Module]:
        """Makes a norm over a number of features."""
        return partial(NORMS[self.norm], eps=self.norm_eps)

    def _permutes(self, block: int, mixing: str) -> bool:
        chosen = self.permuted_blocks is None or block in self.permuted_blocks
        return self.permutation == "random" and chosen and self.permuted_mixings in (mixing, "both")

    def _random(self, rows: int, widths: Sequence[int], key: tuple[int, int]) -> Permutations:
        each_layer = self.permuted_layers == "each"
        return random_permutations(rows, widths, self.channels, (self.permutation_seed, *key), each_layer)


class TokenSkip(nn.Module):
    """LN(W X): the skip of the first token mixing where it maps S0 to S tokens (equations S.14, S.15).

    W has no bias: it would add one number to all channels of a token, which the norm takes out.
    """

    def __init__(self, tokens_in: int, tokens: int, norm: nn.Module):
        super().__init__()
        self.fc = nn.Linear(tokens_in, tokens, bias=False)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """[B, S0, C] -> [B, S, C]."""
        return self.norm(self.fc(x.transpose(1, 2)).transpose(1, 2))


class MixerBlock(nn.Module):
    """U = skip(X) + mix_tokens(LN(X)), Y = skip(U) + mix_channels(LN(U)): [B, S0, C] -> [B, S, C]."""

    def __init__(self, shape: MixerShape, number: int, tokens_in: int):
        super().__init__()
        tokens, norm = shape.tokens or tokens_in, partial(shape.norm_layer, shape.channels)
        self.skip = shape.skip(number, tokens_in)
        self.norm1 = norm()
        self.mlp_tokens = shape.token_mixing(number, tokens_in)
        self.drop_path1, self.drop_path2 = drop_path(shape.drop_path_rate), drop_path(shape.drop_path_rate)
        self.norm2 = norm()
        self.channel_skip = shape.permuted_skip(number, tokens, "channel")
        self.mlp_channels = shape.channel_mixing(number, tokens)
        self.batch_last = False  # in training; set by widemix.engine.memory_layout

    def fits_batch_last(self) -> bool:
        """Whether `batch_last.forward` computes what this block does: no groups of tokens, no other layers."""
        parts = list(self.modules())[1:]
        skips = [getattr(skip, "fc", None) for skip in (self.skip, self.channel_skip)]  # products without a bias
        layers = [part for part in parts if isinstance(part, (nn.Linear, nn.LayerNorm)) and part not in skips]
        return set(map(type, parts)) <= _PARTS and all(layer.bias is not None for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S0, C] -> [B, S, C]."""
        if not torch.jit.is_scripting():  # noqa: SIM102 (alone, so that TorchScript skips what follows)
            if self.training and self.batch_last and not batch_last.needs_eager_ops(self, x):
                return batch_last.forward(self, x)
        x = self.skip(x) + self.drop_path1(self.mlp_tokens(self.norm1(x)))
        return self.channel_skip(x) + self.drop_path2(self.mlp_channels(self.norm2(x)))


# What a block that can be computed with the batch last is made of.
_PARTS = {TokenSkip, MixingLayer, MixingMlp, Permute, Transpose, DropPath, Square}
_PARTS |= {nn.Identity, nn.Linear, nn.LayerNorm, nn.GELU, *STRUCTURED}


def mixer_blocks(shape: MixerShape, tokens_in: int) -> nn.Sequential:
    """L blocks, [B, tokens_in, C] -> [B, S, C]."""
    tokens = [tokens_in] + [shape.tokens or tokens_in] * (shape.depth - 1)
    return nn.Sequential(*[MixerBlock(shape, number, tokens[number]) for number in range(shape.depth)])


def _widths(inputs: int, hidden: int | None, outputs: int) -> tuple[int, ...]:
    return (inputs, outputs) if hidden is None else (inputs, hidden, outputs)
