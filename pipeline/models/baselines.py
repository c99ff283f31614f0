"""Base of the baselines with patches: FF-only, Vision Permutator and RepMLP, each with blocks of one size.

Their blocks map tokens [B, S, C] on an h x w grid, read row by row, to as many. Stem, pooling and head are the
Mixer's (FF-only has a class token instead of pooling, as published).

Shapes: B batch, S = h*w tokens, C channels.
"""

from timm.models.mlp_mixer import MlpMixer
from torch import nn

from widemix.models.layers import init_weights


class Baseline(MlpMixer):
    """timm's stem, final norm, pooling and head around blocks of tokens."""

    def __init__(
        self,
        *,
        patch_size: int,
        channels: int,
        img_size: int,
        in_chans: int = 3,
        num_classes: int = 1000,
        drop_rate: float = 0.0,
        global_pool: str = "avg",
    ):
        super().__init__(
            patch_size=patch_size,
            embed_dim=channels,
            num_blocks=0,
            img_size=img_size,
            in_chans=in_chans,
            num_classes=num_classes,
            drop_rate=drop_rate,
            global_pool=global_pool,
        )

    def set_blocks(self, blocks: list[nn.Module]) -> None:
        """Use these blocks, and sample the initial weights of the whole network."""
        self.blocks = nn.Sequential(*blocks)
        step = {"num_chs": self.num_features, "reduction": self.stem.feat_ratio()}
        self.feature_info = [{"module": f"blocks.{i}", **step} for i in range(len(blocks))]
        init_weights(self, self.head)
