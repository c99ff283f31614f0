"""Base of the baselines with patches: FF-only, Vision Permutator and RepMLP, each with blocks of one size.

Their blocks map tokens [B, S, C] on an h x w grid, read row by row, to as many. Stem, pooling and head are the
Mixer's (FF-only has a class token instead of pooling, as published).

Shapes: B batch, S = h*w tokens, C channels.
"""

from timm.models.mlp_mixer import MlpMixer
from torch import nn

from widemix.models.layers import init_weights
from widemix.models.section import PatchedSection


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
