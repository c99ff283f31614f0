"""RepMLP (Ding et al. 2022), with blocks of one size: trained with convolutions in parallel to the token mixing.

In training a block adds, for each of G sets of channels, a dense layer over all tokens and small convolutions, each
with its batch norm. `fuse` folds them exactly into one dense layer a set, and the feed-forward's norms likewise.

Shapes: B batch, S = h*w tokens, C channels, G share-sets; channel c belongs to set c mod G.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from widemix.models.baselines import Baseline
from widemix.models.drop_path import drop_path
from widemix.models.layers import BlockDiagonal
from widemix.models.repmlp.section import RepMlpSection
from widemix.models.section import hidden_width


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

    def matrices(self) -> tuple[Tensor, Tensor]:
        """What it computes in evaluation, as dense matrices [G, S, S] and biases [G]."""
        scale, bias = folded(self.norm)
        size = self.grid[0] * self.grid[1]
        unit = torch.eye(size, dtype=scale.dtype, device=scale.device).view(size, 1, *self.grid)
        answers = conv2d(
            unit.expand(-1, len(scale), -1, -1),
            self.conv.weight * scale[:, None, None, None],
            padding=self.conv.padding,
            groups=len(scale),
        )  # [S in, G, h, w]
        return answers.flatten(2).permute(1, 2, 0), bias


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

    def fused(self) -> "FusedPerceptron":
        """A copy for evaluation that computes the same from one dense layer a set."""
        scale, bias = folded(self.norm)
        weight = self.dense.weight * scale[:, None, None]
        for local in self.local:
            assert isinstance(local, LocalPerceptron)
            its_weight, its_bias = local.matrices()
            weight, bias = weight + its_weight, bias + its_bias
        return FusedPerceptron(weight, bias)


class FusedPerceptron(nn.Module):
    """One dense layer a set: [N, G, S] -> [N, G, S]."""

    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.dense = BlockDiagonal(weight.shape[0], weight.shape[2], weight.shape[1], shared=False)
        self.dense.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias[:, None])

    def forward(self, x: Tensor) -> Tensor:
        """[N, G, S] -> [N, G, S]."""
        return self.dense(x) + self.bias


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
        self.perceptron: nn.Module = ChannelPerceptron(grid, section.share_sets, section.kernels)
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

    def fuse(self) -> None:
        """Fold convolutions and norms into linear layers. The two norms before mixing and FFN remain."""
        assert isinstance(self.perceptron, ChannelPerceptron)
        self.perceptron = self.perceptron.fused()
        first, its_norm, act, second, last_norm = self.ffn
        self.ffn = nn.Sequential(_folded_linear(first, its_norm), act, _folded_linear(second, last_norm))


class RepMlp(Baseline):
    """RepMLP in its training form; `fused` gives its form for inference."""

    def __init__(self, section: RepMlpSection, **timm):
        super().__init__(section, **timm)
        self.set_blocks([RepMlpBlock(section, self.stem.grid_size) for _ in range(section.depth)])

    @torch.no_grad()
    def fused(self) -> "RepMlp":
        """A copy for evaluation that computes the same from linear layers."""
        model = copy.deepcopy(self).eval()
        for block in model.blocks:
            assert isinstance(block, RepMlpBlock)
            block.fuse()
        return model


def folded(norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    """Scale and bias of a batch norm in evaluation, x -> scale * x + bias."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    return scale, norm.bias - norm.running_mean * scale


def _folded_linear(linear: nn.Module, norm: nn.Module) -> nn.Linear:
    assert isinstance(linear, nn.Linear)
    assert isinstance(norm, TokenNorm)
    scale, bias = folded(norm.norm)
    result = nn.Linear(linear.in_features, linear.out_features).to(linear.weight)
    result.weight = nn.Parameter(linear.weight * scale[:, None])
    result.bias = nn.Parameter(bias)
    return result
