"""Shallow MLPs x -> Bc B2 ReLU(B1 x) of dense, Monarch and Kronecker matrices (Hayase & Karakida 2024, figure 2d).

A Monarch matrix (equation 12) is J_c^T L J_c R with block-diagonal L and R: split the vector into rows, transform
each row by its own block, transpose, transform again, transpose back. With all blocks of a factor equal it is the
Kronecker product of one block of each: a linear Mixer block.

Shapes: B batch, r rows and s columns of the input, R rows and S columns of the output.
"""

from typing import Literal

from torch import Tensor, nn

from widemix.models.layers import BlockDiagonal
from widemix.models.mlp_base import MlpClassifier
from widemix.models.shallow.section import ShallowSection
from widemix.models.structured_factors import split

Matrix = Literal["dense", "monarch", "kronecker"]


class Monarch(nn.Module):
    """J_c^T L J_c R without bias: [B, r*s] -> [B, R*S]. With `shared` blocks the Kronecker product W (x) V."""

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
    """x -> Bc B2 ReLU(B1 x): pixels -> m -> m -> classes. Bc, the head, is dense.

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
