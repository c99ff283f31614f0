"""FF-only (Melas-Kyriazi 2021).

Shapes: B batch, S tokens, C channels.
"""

import torch
from timm.layers import Mlp
from timm.models import checkpoint_seq
from torch import Tensor, nn

from widemix.errors import InputError
from widemix.models.baselines import Baseline
from widemix.models.drop_path import drop_path
from widemix.models.ff_only.section import FfOnlySection
from widemix.models.layers import LayerNorm
from widemix.models.section import hidden_width


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
