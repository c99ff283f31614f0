"""Blocks of MLP-Mixers and S-Mixers (Tolstikhin et al. 2021; Hayase & Karakida 2024), with any permutations.

Shapes: B batch, S tokens, C channels, S0 tokens before the first block, D hidden width of a mixing.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from widemix.models import permutation
from widemix.models.batch_last import block as batch_last
from widemix.models.drop_path import DropPath, drop_path
from widemix.models.layers import LayerNorm
from widemix.models.mixer.section import MIXINGS, MixerSection, MixingKind
from widemix.models.permutation import Permute, Transpose
from widemix.models.pk_layers import MixingLayer, MixingMlp, Square, mixing
from widemix.models.structured import STRUCTURED

NORMS: dict[str, Callable[..., nn.Module]] = {"layer": LayerNorm, "none": nn.Identity}


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

    def __init__(self, section: MixerSection, number: int, tokens_in: int):
        super().__init__()
        norm = partial(norm_layer(section), section.channels)
        tokens = section.tokens_from(tokens_in)
        projects = section.project_tokens is not None and number == 0
        self.skip = TokenSkip(tokens_in, tokens, norm()) if projects else _skip(section, number, "token", tokens)
        self.norm1 = norm()
        self.mlp_tokens = mixing(section, number, "token", tokens_in)
        self.drop_path1, self.drop_path2 = drop_path(section.drop_path), drop_path(section.drop_path)
        self.norm2 = norm()
        self.channel_skip = _skip(section, number, "channel", tokens)
        self.mlp_channels = mixing(section, number, "channel", tokens)
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


def mixer_blocks(section: MixerSection, tokens_in: int) -> nn.Sequential:
    """L blocks, [B, tokens_in, C] -> [B, S, C]."""
    tokens = [tokens_in] + [section.tokens_from(tokens_in)] * (section.depth - 1)
    return nn.Sequential(*[MixerBlock(section, number, tokens[number]) for number in range(section.depth)])


def norm_layer(section: MixerSection) -> Callable[..., nn.Module]:
    """Return what makes a norm over a number of features."""
    return partial(NORMS[section.norm], eps=section.norm_eps)


def _skip(section: MixerSection, block: int, kind: MixingKind, tokens: int) -> nn.Module:
    """pi_r, the permutation of a mixing's skip: [B, S, C] -> [B, S, C]."""
    if not (section.permuted_skips and section.is_permuted(block, kind)):
        return nn.Identity()
    key = (section.permutation_seed, block, 2 + MIXINGS.index(kind))
    return Permute(permutation.random(tokens * section.channels, key), columns=section.channels)
