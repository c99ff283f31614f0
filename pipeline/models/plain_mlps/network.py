"""MLPs without tokens: beta-LASSO's S-FC and S-LOCAL, "Scaling MLPs"'s residual MLP, and MLPs of structured matrices.

Shapes: B batch, m features; of a structured matrix r rows and s columns of the input, R and S of the output.
"""

import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from widemix.models.layers import BlockDiagonal, LayerNorm
from widemix.models.mlp_base import MlpClassifier
from widemix.models.plain_mlps.section import (
    HIDDEN,
    KERNEL,
    PADDING,
    STRIDE,
    BottleneckMlpSection,
    LassoSection,
    ShallowSection,
    count_positions,
)
from widemix.models.section import hidden_width
from widemix.models.structured_factors import split


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


class LassoNet(MlpClassifier):
    """S-FC or S-LOCAL of beta-LASSO (Neyshabur 2020): pixels -> alpha * (s/2)^2 -> 24 alpha -> classes.

    Both are S-CONV (9 x 9 convolution of stride 2 to alpha channels, then 24 alpha hidden units, batch norm and ReLU
    after each) with the convolution made fully connected, or locally connected: a convolution with weights of its own
    at every position. alpha = 150 gives S-FC 256 M weights, a pair for the Mixers of Hayase & Karakida 2024, table 1.
    """

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


# Names in the published files -> ours.
_PUBLISHED = (
    (r"linear_in\.", "stem."),
    (r"blocks\.(\d+)\.block\.0\.", r"blocks.\1.fc1."),
    (r"blocks\.(\d+)\.block\.2\.", r"blocks.\1.fc2."),
    (r"layernorms\.(\d+)\.", r"blocks.\1.norm."),
    (r"linear_out\.", "head."),
)


class BottleneckBlock(nn.Module):
    """x + W2 GELU(W1 LN(x)): [B, m] -> [B, m]."""

    def __init__(self, width: int, hidden: int, eps: float):
        super().__init__()
        self.norm = LayerNorm(width, eps=eps)
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, m] -> [B, m]."""
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


class BottleneckMlp(MlpClassifier):
    """The residual MLP of "Scaling MLPs" (Bachmann et al. 2023): images [B, in_chans, H, W] -> logits [B, classes].

    Pixels -> m features; blocks of gamma m hidden features; a linear head, no norm before it.
    """

    def __init__(self, section: BottleneckMlpSection, *, img_size: int, num_classes: int, in_chans: int = 3):
        width, hidden = section.width, hidden_width(section.expansion, section.width)
        super().__init__(
            nn.Linear(in_chans * img_size**2, width),
            nn.Sequential(*[BottleneckBlock(width, hidden, section.norm_eps) for _ in range(section.depth)]),
            nn.Identity(),
            width=width,
            img_size=img_size,
            in_chans=in_chans,
            num_classes=num_classes,
        )

    @staticmethod
    def from_published(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Weights under the names of the published files, under ours; others as they are."""
        if "linear_in.weight" not in weights:
            return weights
        renamed = {}
        for name, tensor in weights.items():
            for theirs, ours in _PUBLISHED:
                name = re.sub(f"^{theirs}", ours, name)
            renamed[name] = tensor
        return renamed


Matrix = Literal["dense", "monarch", "kronecker"]


class Monarch(nn.Module):
    """A Monarch matrix (equation 12) J_c^T L J_c R with block-diagonal L and R, without bias: [B, r*s] -> [B, R*S].

    Split the vector into rows, transform each row by its own block, transpose, transform again, transpose back. With
    `shared` blocks, all of a factor equal, it is the Kronecker product of one of each: a linear Mixer block.
    """

    def __init__(self, inputs: int, outputs: int, shared: bool):
        super().__init__()
        self.rows, columns = split(inputs)
        out_rows, out_columns = split(outputs)
        self.right = BlockDiagonal(self.rows, columns, out_columns, shared)
        self.left = BlockDiagonal(out_columns, self.rows, out_rows, shared)

    def forward(self, x: Tensor) -> Tensor:
        """[B, r*s] -> [B, R*S]."""
        x = self.right(x.unflatten(1, (self.rows, -1)))  # [B, r, s] -> [B, r, S]
        x = self.left(x.transpose(1, 2))  # [B, S, r] -> [B, S, R]
        return x.transpose(1, 2).flatten(1)  # [B, R*S]


def matrix(kind: Matrix, inputs: int, outputs: int) -> nn.Module:
    """Return a matrix without bias, [B, inputs] -> [B, outputs], whose output has the variance of its input."""
    if kind == "dense":
        return nn.Linear(inputs, outputs, bias=False)
    return Monarch(inputs, outputs, shared=kind == "kronecker")


class ShallowMlp(MlpClassifier):
    """x -> Bc B2 ReLU(B1 x) (Hayase & Karakida 2024, figure 2d): pixels -> m -> m -> classes. The head Bc is dense.

    With `grayscale` it reads the first channel alone: those of a gray image are equal.
    """

    def __init__(self, section: ShallowSection, *, img_size: int, num_classes: int, in_chans: int = 3):
        read = 1 if section.grayscale else in_chans
        stem = nn.Sequential(matrix(section.matrices, read * img_size**2, section.width), nn.ReLU())
        blocks = nn.Sequential(matrix(section.matrices, section.width, section.width))
        outer = {"width": section.width, "img_size": img_size, "in_chans": in_chans, "num_classes": num_classes}
        super().__init__(stem, blocks, nn.Identity(), **outer)
        self.channels_read = read

    def embed(self, x: Tensor) -> Tensor:
        """[B, in_chans, H, W] -> [B, width]."""
        return self.stem(x[:, : self.channels_read].flatten(1))
