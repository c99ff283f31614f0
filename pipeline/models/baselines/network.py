"""Baselines with patches: FF-only, Vision Permutator and RepMLP, each with blocks of one size.

Their blocks map tokens [B, S, C] on an h x w grid, read row by row, to as many. Stem, pooling and head are the
Mixer's (FF-only has a class token instead of pooling, as published).

Shapes: B batch, S = h*w tokens, C channels, G share-sets of RepMLP; channel c belongs to set c mod G.
"""

from collections.abc import Sequence

import torch
from timm.layers import Mlp
from timm.models import checkpoint_seq
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn

from widemix.errors import InputError
from widemix.models.baselines.section import FfOnlySection, PermutatorSection, RepMlpSection
from widemix.models.drop_path import drop_path
from widemix.models.layers import BlockDiagonal, LayerNorm, init_weights
from widemix.models.section import PatchedSection, hidden_width


class Baseline(MlpMixer):
    """timm's stem, final norm, pooling and head around blocks of tokens."""

    def __init__(self, section: PatchedSection, **timm):
        super().__init__(patch_size=section.patch_size, embed_dim=section.channels, num_blocks=0, **timm)

    def set_blocks(self, blocks: list[nn.Module]) -> None:
        """Use these blocks, and sample the initial weights of the whole network."""
        self.blocks = nn.Sequential(*blocks)
        step = {"num_chs": self.num_features, "reduction": self.stem.feat_ratio()}
        self.feature_info = [{"module": f"blocks.{i}", **step} for i in range(len(blocks))]
        init_weights(self, self.head)


class FfBlock(nn.Module):
    """X + MLP_channels(LN(X)), then X^T + MLP_tokens(LN(X^T)): the second norm runs over the tokens."""

    def __init__(self, section: FfOnlySection, tokens: int):
        super().__init__()
        channels, expansion, drop = section.channels, section.expansion, section.drop_path
        self.norm1 = LayerNorm(channels)
        self.mlp1 = Mlp(channels, hidden_width(expansion, channels))
        self.norm2 = LayerNorm(tokens)
        self.mlp2 = Mlp(tokens, hidden_width(expansion, tokens))
        self.drop_path1, self.drop_path2 = drop_path(drop), drop_path(drop)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, C] -> [B, S, C]."""
        x = x + self.drop_path1(self.mlp1(self.norm1(x)))
        x = x.transpose(1, 2)  # [B, C, S]
        x = x + self.drop_path2(self.mlp2(self.norm2(x)))
        return x.transpose(1, 2)


class FfOnly(Baseline):
    """A ViT with feed-forward layers over tokens in place of attention (Melas-Kyriazi 2021), class token and all."""

    def __init__(self, section: FfOnlySection, **timm):
        super().__init__(section, **timm)
        tokens = 1 + self.stem.num_patches
        self.cls_token = nn.Parameter(torch.zeros(1, 1, section.channels))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, section.channels))
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        self.set_blocks([FfBlock(section, tokens) for _ in range(section.depth)])

    def forward_features(self, x: Tensor) -> Tensor:
        """[B, in_chans, H, W] -> tokens [B, 1 + S, C], the class token first."""
        x = self.stem(x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed  # [B, 1 + S, C]
        if self.grad_checkpointing and not torch.jit.is_scripting():
            x = checkpoint_seq(self.blocks, x)
        else:
            x = self.blocks(x)
        return self.norm(x)

    def forward_intermediates(self, *args, **kwargs):
        """Raise `InputError`: with the class token the blocks' outputs are not maps."""
        raise InputError("FF-only: its features are not a map; use forward_features")

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """[B, 1 + S, C] -> logits [B, num_classes] of the class token, or its features with `pre_logits`."""
        if self.global_pool:
            x = x[:, 0]
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)


class PermuteMlp(nn.Module):
    """Mixes along height, width and channels separately, and adds the three with weights that depend on the image.

    Channels fall into h segments of C/h. Along the height, one vector of C numbers is segment s of all tokens of a
    column; along the width, of all tokens of a row. The grid is square.
    """

    def __init__(self, side: int, channels: int):
        super().__init__()
        self.side = side
        self.mlp_h = nn.Linear(channels, channels, bias=False)
        self.mlp_w = nn.Linear(channels, channels, bias=False)
        self.mlp_c = nn.Linear(channels, channels, bias=False)
        self.reweight = Mlp(channels, channels // 4, 3 * channels)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, C] -> [B, S, C]."""
        segments = x.unflatten(1, (self.side, self.side)).unflatten(3, (self.side, -1))  # [B, h, w, s, C/h]
        along_h = self.mlp_h(segments.permute(0, 3, 2, 1, 4).flatten(3))  # [B, s, w, h * C/h]
        along_h = along_h.unflatten(3, (self.side, -1)).permute(0, 3, 2, 1, 4).flatten(3).flatten(1, 2)  # [B, S, C]
        along_w = self.mlp_w(segments.permute(0, 1, 3, 2, 4).flatten(3))  # [B, h, s, w * C/h]
        along_w = along_w.unflatten(3, (self.side, -1)).permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)
        along_c = self.mlp_c(x)
        pooled = (along_h + along_w + along_c).mean(1)
        fraction = self.reweight(pooled).unflatten(1, (-1, 1, 3)).softmax(dim=3).transpose(1, 2)  # [B, 1, C, 3]
        return self.proj(along_h * fraction[..., 0] + along_w * fraction[..., 1] + along_c * fraction[..., 2])


class PermutatorBlock(nn.Module):
    """X + PermuteMlp(LN(X)), then X + MLP_channels(LN(X))."""

    def __init__(self, section: PermutatorSection, side: int):
        super().__init__()
        channels = section.channels
        self.norm1 = LayerNorm(channels)
        self.mix = PermuteMlp(side, channels)
        self.norm2 = LayerNorm(channels)
        self.mlp = Mlp(channels, hidden_width(section.expansion, channels))
        self.drop_path1, self.drop_path2 = drop_path(section.drop_path), drop_path(section.drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, C] -> [B, S, C]."""
        x = x + self.drop_path1(self.mix(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class Permutator(Baseline):
    """Vision Permutator (Hou et al. 2021) with blocks of one size; ViP-S/14 is patch 14, C 384, L 18, expansion 3."""

    def __init__(self, section: PermutatorSection, **timm):
        super().__init__(section, **timm)
        side = self.stem.grid_size[0]
        self.set_blocks([PermutatorBlock(section, side) for _ in range(section.depth)])


class TokenNorm(nn.Module):
    """Batch norm of the channels of tokens [B, S, C]."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, C] -> [B, S, C]."""
        return self.norm(x.flatten(0, 1)).view_as(x)


class LocalPerceptron(nn.Module):
    """A k x k convolution on every set, and its norm: [N, G, S] -> [N, G, S]."""

    def __init__(self, grid: tuple[int, int], sets: int, kernel: int):
        super().__init__()
        self.grid = grid
        self.conv = nn.Conv2d(sets, sets, kernel, padding=kernel // 2, groups=sets, bias=False)
        self.norm = nn.BatchNorm1d(sets)

    def forward(self, x: Tensor) -> Tensor:
        """[N, G, S] -> [N, G, S]."""
        return self.norm(self.conv(x.unflatten(2, self.grid)).flatten(2))


class ChannelPerceptron(nn.Module):
    """Dense layers over all tokens, one a set, plus convolutions: [N, G, S] -> [N, G, S]."""

    def __init__(self, grid: tuple[int, int], sets: int, kernels: Sequence[int]):
        super().__init__()
        size = grid[0] * grid[1]
        self.dense = BlockDiagonal(sets, size, size, shared=False)
        self.norm = nn.BatchNorm1d(sets)
        self.local = nn.ModuleList([LocalPerceptron(grid, sets, kernel) for kernel in kernels])

    def forward(self, x: Tensor) -> Tensor:
        """[N, G, S] -> [N, G, S]."""
        out = self.norm(self.dense(x))
        for local in self.local:
            out = out + local(x)
        return out


class RepMlpBlock(nn.Module):
    """X + gate * perceptron(BN(X)), then X + FFN(BN(X)); the gate sees each channel's mean."""

    def __init__(self, section: RepMlpSection, grid: tuple[int, int]):
        super().__init__()
        self.sets, channels = section.share_sets, section.channels
        hidden = hidden_width(section.expansion, channels)
        self.norm1 = TokenNorm(channels)
        self.gate = nn.Sequential(
            nn.Linear(channels, channels // 4), nn.ReLU(), nn.Linear(channels // 4, channels), nn.Sigmoid()
        )
        self.perceptron = ChannelPerceptron(grid, section.share_sets, section.kernels)
        self.gated = nn.Identity()  # the name of what is added to the skip, for those who look into the network
        self.norm2 = TokenNorm(channels)
        self.ffn = nn.Sequential(
            nn.Linear(channels, hidden, bias=False),
            TokenNorm(hidden),
            nn.GELU(),
            nn.Linear(hidden, channels, bias=False),
            TokenNorm(channels),
        )
        self.drop_path1, self.drop_path2 = drop_path(section.drop_path), drop_path(section.drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, C] -> [B, S, C]."""
        x = x + self.drop_path1(self.mix(self.norm1(x)))
        return x + self.drop_path2(self.ffn(self.norm2(x)))

    def mix(self, x: Tensor) -> Tensor:
        """The token mixing times the gate: [B, S, C] -> [B, S, C]."""
        gate = self.gate(x.mean(1, keepdim=True))  # [B, 1, C]
        maps = x.transpose(1, 2).unflatten(1, (-1, self.sets)).flatten(0, 1)  # [B * C/G, G, S]
        mixed = self.perceptron(maps).unflatten(0, (x.shape[0], -1)).flatten(1, 2)  # [B, C, S]
        return self.gated(mixed.transpose(1, 2) * gate)


class RepMlp(Baseline):
    """RepMLP (Ding et al. 2022) in its training form, with convolutions beside the dense layers."""

    def __init__(self, section: RepMlpSection, **timm):
        super().__init__(section, **timm)
        self.set_blocks([RepMlpBlock(section, self.stem.grid_size) for _ in range(section.depth)])
