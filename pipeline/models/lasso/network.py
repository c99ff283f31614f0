"""beta-LASSO (Neyshabur 2020), the dynamic-sparsity baseline: its shallow networks S-FC and S-LOCAL.

Both are S-CONV (9 x 9 convolution of stride 2 to alpha channels, then 24 alpha hidden units, batch norm and ReLU
after each) with the convolution made fully connected, or locally connected: a convolution with weights of its own at
every position. alpha = 150 gives S-FC 256 M weights, a pair for the Mixers of Hayase & Karakida 2024, table 1.
"""

import torch
from torch import Tensor, nn

from widemix.models.lasso.section import LassoSection
from widemix.models.mlp_base import MlpClassifier

KERNEL, STRIDE, PADDING = 9, 2, 4
HIDDEN = 24  # hidden units over alpha


class LocallyConnected(nn.Module):
    """A 9 x 9 layer of stride 2 whose positions share no weights: [B, in_chans*s*s] -> [B, channels*(s/2)^2]."""

    def __init__(self, in_chans: int, side: int, channels: int):
        super().__init__()
        self.in_chans, self.side = in_chans, side
        inputs = in_chans * KERNEL**2
        self.unfold = nn.Unfold(KERNEL, padding=PADDING, stride=STRIDE)
        self.weight = nn.Parameter(torch.randn(count_positions(side), inputs, channels) * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, in_chans*s*s] -> [B, channels*(s/2)^2]."""
        images = x.unflatten(1, (self.in_chans, self.side, self.side))
        patches = self.unfold(images)  # [B, inputs, positions]
        out = patches.permute(2, 0, 1) @ self.weight  # [positions, B, channels]
        return out.permute(1, 2, 0).flatten(1)


def count_positions(side: int) -> int:
    """Number of positions of the 9 x 9 window of stride 2 on an image of `side` pixels."""
    return len(_starts(side)) ** 2


def count_pixels(side: int) -> int:
    """Number of pixels that the windows of all positions have together, without the border around the image."""
    return sum(min(start + KERNEL, side) - max(start, 0) for start in _starts(side)) ** 2


def _starts(side: int) -> range:
    """Where the window begins at each of its positions along a side of the image; below 0 within the border."""
    return range(-PADDING, side + PADDING - KERNEL + 1, STRIDE)


class LassoNet(MlpClassifier):
    """S-FC or S-LOCAL: pixels -> alpha * (s/2)^2 -> 24 alpha -> classes."""

    def __init__(self, section: LassoSection, *, img_size: int, num_classes: int, in_chans: int = 3):
        first, width = section.base_channels * count_positions(img_size), HIDDEN * section.base_channels
        if section.kind == "s_fc":
            opening: nn.Module = nn.Linear(in_chans * img_size**2, first, bias=False)
        else:
            opening = LocallyConnected(in_chans, img_size, section.base_channels)
        super().__init__(
            nn.Sequential(opening, nn.BatchNorm1d(first), nn.ReLU()),
            nn.Sequential(nn.Linear(first, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()),
            nn.Identity(),
            width=width,
            img_size=img_size,
            in_chans=in_chans,
            num_classes=num_classes,
        )
