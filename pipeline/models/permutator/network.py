"""Vision Permutator (Hou et al. 2021), with blocks of one size.

Shapes: B batch, S = h*w tokens, C channels.
"""

from timm.layers import Mlp
from torch import Tensor, nn

from widemix.models.baselines import Baseline
from widemix.models.drop_path import drop_path
from widemix.models.layers import LayerNorm
from widemix.models.permutator.section import PermutatorSection
from widemix.models.section import hidden_width


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
