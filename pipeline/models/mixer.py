"""MLP-Mixer and S-Mixer (Tolstikhin et al. 2021; Hayase & Karakida 2024), with any permutations.

Shapes: B batch, S tokens, C channels, S0 tokens after the patch layer, D hidden width of a mixing.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from timm.layers import DropPath, lecun_normal_
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn

from pipeline.models.pk import channel_permutations, mixing, random_permutations, token_permutations

# timm's and the original code's. Hayase & Karakida write 1e-5, which on features of unit variance is 5e-6 apart.
LayerNorm = partial(nn.LayerNorm, eps=1e-6)


class TokenSkip(nn.Module):
    """LN(W X): the skip of the first token mixing where it maps S0 to S tokens (equations S.14, S.15).

    W has no bias: it would add one number to all channels of a token, which the norm takes out.
    """

    def __init__(self, tokens_in: int, tokens: int, channels: int):
        super().__init__()
        self.fc = nn.Linear(tokens_in, tokens, bias=False)
        self.norm = LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x.transpose(1, 2)).transpose(1, 2))  # [B, S0, C] -> [B, S, C]


class MixerBlock(nn.Module):
    """U = skip(X) + mix_tokens(LN(X)), Y = U + mix_channels(LN(U)): [B, S0, C] -> [B, S, C]."""

    def __init__(
        self, channels: int, skip: nn.Module, mix_tokens: nn.Module, mix_channels: nn.Module, drop_path: float
    ):
        super().__init__()
        self.skip = skip
        self.norm1 = LayerNorm(channels)
        self.mlp_tokens = mix_tokens
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = LayerNorm(channels)
        self.mlp_channels = mix_channels

    def forward(self, x: Tensor) -> Tensor:
        x = self.skip(x) + self.drop_path(self.mlp_tokens(self.norm1(x)))
        return x + self.drop_path(self.mlp_channels(self.norm2(x)))


class Mixer(MlpMixer):
    """Patch layer, L mixing blocks, LN, global average, linear head: pictures [B, 3, H, W] -> logits [B, classes].

    timm's MlpMixer lends its interface (features, head, classifier, checkpointing; `timm` holds its arguments such as
    img_size, patch_size, num_classes) and its weight names; the blocks are ours.

    token_hidden, channel_hidden: D_S and D_C, or None for the single layers of the S-Mixer.
    tokens: S. None keeps the picture's own S0; a number gives the first block the skip LN(W X), even where S = S0.
    permutation: commutation is the normal Mixer, random the RP Mixer, keyed by `permutation_seed`.
    permuted_blocks: the blocks to permute, from 0; None is all. permuted_mixings: which of their mixings.
    permuted_layers: around each mixing (appendix A.2.3), or around each of its two layers (section 5.2).
    """

    def __init__(
        self,
        *,
        channels: int,
        depth: int,
        token_hidden: int | None,
        channel_hidden: int | None,
        tokens: int | None = None,
        permutation: Literal["commutation", "random"] = "commutation",
        permutation_seed: int = 0,
        permuted_blocks: Sequence[int] | None = None,
        permuted_mixings: Literal["token", "channel", "both"] = "both",
        permuted_layers: Literal["mixing", "each"] = "mixing",
        drop_path_rate: float = 0.0,
        **timm,
    ):
        super().__init__(embed_dim=channels, num_blocks=0, **timm)

        def permutations(block: int, place: Literal["token", "channel"], rows: int, widths: Sequence[int]):
            chosen = permuted_blocks is None or block in permuted_blocks
            if permutation == "random" and chosen and permuted_mixings in (place, "both"):
                key = (permutation_seed, block, ("token", "channel").index(place))
                return random_permutations(rows, widths, channels, key, each_layer=permuted_layers == "each")
            return token_permutations() if place == "token" else channel_permutations()

        blocks: list[nn.Module] = []
        tokens_in, tokens_out = self.stem.num_patches, tokens or self.stem.num_patches
        for number in range(depth):
            projects = tokens is not None and number == 0
            skip = TokenSkip(tokens_in, tokens_out, channels) if projects else nn.Identity()
            token_widths = _widths(tokens_in, token_hidden, tokens_out)
            channel_widths = _widths(channels, channel_hidden, channels)
            mix_tokens = mixing(token_widths, permutations(number, "token", channels, token_widths))
            mix_channels = mixing(channel_widths, permutations(number, "channel", tokens_out, channel_widths))
            blocks.append(MixerBlock(channels, skip, mix_tokens, mix_channels, drop_path_rate))
            tokens_in = tokens_out
        self.blocks = nn.Sequential(*blocks)
        reduction = self.stem.feat_ratio()
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": channels, "reduction": reduction} for i in range(depth)
        ]
        self.init_weights()

    @torch.jit.ignore
    def init_weights(self, nlhb: bool = False) -> None:
        """Weights N(0, 1 / inputs), biases and head zero, norms one and zero: a function of torch's seed.

        `nlhb` is timm's: a head bias of -log(classes).
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            elif isinstance(module, nn.Conv2d):
                lecun_normal_(module.weight)
            else:
                continue
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if isinstance(self.head, nn.Linear):
            nn.init.zeros_(self.head.weight)
            nn.init.constant_(self.head.bias, -math.log(self.num_classes) if nlhb else 0.0)


def _widths(inputs: int, hidden: int | None, outputs: int) -> tuple[int, ...]:
    return (inputs, outputs) if hidden is None else (inputs, hidden, outputs)
