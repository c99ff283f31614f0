"""Relatives of the Mixer for side-by-side runs: FF-only, Vision Permutator and RepMLP, each with blocks of one size.

All take and give tokens [B, S, C] on an h x w grid, read row by row, and share the Mixer's stem, pooling and head
(FF-only its own class token, as published). ViT, ResMLP and gMLP come from timm.

Shapes: B batch, S = h*w tokens, C channels.
"""

import torch
from timm.layers import DropPath, Mlp
from timm.models import checkpoint_seq
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn

from pipeline.errors import InputError
from pipeline.models.initial import initialise
from pipeline.models.mixer import NORMS

LayerNorm = NORMS["layer"]


def drop_path(rate: float) -> nn.Module:
    return DropPath(rate) if rate > 0 else nn.Identity()


class Relative(MlpMixer):
    """timm's stem, final norm, pooling and head around blocks of tokens. `outer` is img_size, num_classes, ..."""

    def __init__(self, *, patch_size: int, channels: int, **outer):
        super().__init__(patch_size=patch_size, embed_dim=channels, num_blocks=0, **outer)

    def take(self, blocks: list[nn.Module]) -> None:
        """Use these blocks, and start the weights."""
        self.blocks = nn.Sequential(*blocks)
        step = {"num_chs": self.num_features, "reduction": self.stem.feat_ratio()}
        self.feature_info = [{"module": f"blocks.{i}", **step} for i in range(len(blocks))]
        initialise(self, self.head)


class FfBlock(nn.Module):
    """X + MLP_channels(LN(X)), then X^T + MLP_tokens(LN(X^T)): the second norm runs over the tokens."""

    def __init__(self, tokens: int, channels: int, expansion: float, drop: float):
        super().__init__()
        self.norm1 = LayerNorm(channels)
        self.mlp1 = Mlp(channels, round(expansion * channels))
        self.norm2 = LayerNorm(tokens)
        self.mlp2 = Mlp(tokens, round(expansion * tokens))
        self.drop_path = drop_path(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.mlp1(self.norm1(x)))
        x = x.transpose(1, 2)  # [B, C, S]
        x = x + self.drop_path(self.mlp2(self.norm2(x)))
        return x.transpose(1, 2)


class FfOnly(Relative):
    """A ViT with feed-forward layers over tokens in place of attention (Melas-Kyriazi 2021), class token and all."""

    def __init__(self, *, depth: int, channels: int, expansion: float = 4.0, drop_path_rate: float = 0.0, **outer):
        super().__init__(channels=channels, **outer)
        tokens = 1 + self.stem.num_patches
        self.cls_token = nn.Parameter(torch.zeros(1, 1, channels))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, channels))
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        self.take([FfBlock(tokens, channels, expansion, drop_path_rate) for _ in range(depth)])

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed  # [B, 1 + S, C]
        if self.grad_checkpointing and not torch.jit.is_scripting():
            x = checkpoint_seq(self.blocks, x)
        else:
            x = self.blocks(x)
        return self.norm(x)

    def forward_intermediates(self, *args, **kwargs):
        """Refused: the blocks see the class token besides the map."""
        raise InputError("FF-only: its features are no map; take forward_features")

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if self.global_pool:
            x = x[:, 0]
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)


class PermuteMlp(nn.Module):
    """Mix along height, width and channels apart, and add the three with learned weights that depend on the picture.

    Channels fall into h segments of C/h. Along the height, one vector of C numbers is segment s of every place in a
    column; along the width, of every place in a row. The grid is square.
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
        segments = x.unflatten(1, (self.side, self.side)).unflatten(3, (self.side, -1))  # [B, h, w, s, C/h]
        along_h = self.mlp_h(segments.permute(0, 3, 2, 1, 4).flatten(3))  # [B, s, w, h * C/h]
        along_h = along_h.unflatten(3, (self.side, -1)).permute(0, 3, 2, 1, 4).flatten(3).flatten(1, 2)  # [B, S, C]
        along_w = self.mlp_w(segments.permute(0, 1, 3, 2, 4).flatten(3))  # [B, h, s, w * C/h]
        along_w = along_w.unflatten(3, (self.side, -1)).permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)
        along_c = self.mlp_c(x)
        pooled = (along_h + along_w + along_c).mean(1)
        share = self.reweight(pooled).unflatten(1, (-1, 1, 3)).softmax(dim=3).transpose(1, 2)  # [B, 1, C, 3]
        return self.proj(along_h * share[..., 0] + along_w * share[..., 1] + along_c * share[..., 2])


class PermutatorBlock(nn.Module):
    """X + PermuteMlp(LN(X)), then X + MLP_channels(LN(X))."""

    def __init__(self, side: int, channels: int, expansion: float, drop: float):
        super().__init__()
        self.norm1 = LayerNorm(channels)
        self.mix = PermuteMlp(side, channels)
        self.norm2 = LayerNorm(channels)
        self.mlp = Mlp(channels, round(expansion * channels))
        self.drop_path = drop_path(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.mix(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class Permutator(Relative):
    """Vision Permutator (Hou et al. 2021) with blocks of one size; ViP-S/14 is patch 14, C 384, L 18, expansion 3."""

    def __init__(self, *, depth: int, channels: int, expansion: float = 3.0, drop_path_rate: float = 0.0, **outer):
        super().__init__(channels=channels, **outer)
        side = self.stem.grid_size[0]
        self.take([PermutatorBlock(side, channels, expansion, drop_path_rate) for _ in range(depth)])
