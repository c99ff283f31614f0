"""Stochastic depth (Huang et al. 2016) whose choices belong to the samples.

timm's `DropPath` samples from torch's generator, so what a sample loses depends on the rank and the place in the
batch that it has. Here the choice is a hash of the sample's key and the layer's number: the same on any number of
ranks, with any gradient accumulation, after any restart, and when activation checkpointing computes a block again.
"""

from collections.abc import Iterable, Sequence

import torch
from timm.layers import DropPath as TimmDropPath
from torch import Tensor, nn

_GOLDEN, _M1, _M2 = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_BITS = 53  # of a hash that are compared with a probability
_MOST_CALLS = 16  # of one layer in its block


class DropPath(nn.Module):
    """In training x [B, ...] of each sample becomes 0 with probability `drop_prob`, else x / (1 - drop_prob).

    Args:
        drop_prob: probability, in [0, 1).
        number: tells this layer's choices apart from those of the network's other layers.
    """

    def __init__(self, drop_prob: float, number: int = 0):
        super().__init__()
        self.drop_prob, self.number = drop_prob, number
        self.counts_calls, self.calls = False, 0  # of this layer in one forward of the block that it is in
        self.keys: Tensor | None = None  # int64 [B], one a sample: `set_drop_path_keys`

    def forward(self, x: Tensor) -> Tensor:
        """[B, ...] -> [B, ...]."""
        scale = self.scale(x)
        return x if scale is None else x * scale.view(-1, *[1] * (x.ndim - 1))

    def scale(self, x: Tensor) -> Tensor | None:
        """Return the factors of the samples of x, [B]; None for ones.

        Without keys, outside of our training loop, torch's generator decides.
        """
        if self.drop_prob == 0.0 or not self.training:
            return None
        if self.keys is None:
            kept = torch.rand(len(x), dtype=torch.float32, device=x.device) >= self.drop_prob
        else:
            kept = keeps(self.keys, self.number * _MOST_CALLS + self.calls, self.drop_prob)
            if self.counts_calls:
                self.calls += 1
        return kept.to(x.dtype) / (1 - self.drop_prob)

    def start_block(self, *_: object) -> None:
        """Count this layer's calls from the first again: a forward pre-hook of the block that it is in."""
        self.calls = 0

    def extra_repr(self) -> str:
        """For print(module)."""
        return f"drop_prob={self.drop_prob:g}, number={self.number}"


def drop_path(rate: float) -> nn.Module:
    """Stochastic depth with this probability, nothing at 0: TorchScript can compile that."""
    return DropPath(rate) if rate > 0 else nn.Identity()


def keeps(keys: Tensor, number: int, drop_prob: float) -> Tensor:
    """Which samples keep the branch of layer `number`, bool [B], from their keys, int64 [B]."""
    stream = scramble(keys ^ number)
    return ((stream >> (64 - _BITS)) & ((1 << _BITS) - 1)) >= int(drop_prob * 2**_BITS)


def scramble(words: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on 64-bit words held as int64, bit for bit `widemix.data.random.scramble`."""
    words = words + _GOLDEN
    words = (words ^ _shifted(words, 30)) * _M1
    words = (words ^ _shifted(words, 27)) * _M2
    return words ^ _shifted(words, 31)


def number_drop_paths(module: nn.Module) -> list[DropPath]:
    """Put ours in the place of timm's `DropPath`s and number them all in the order of the network; returns them.

    A block of timm's may call one layer for several branches. Each call then has choices of its own, counted from the
    beginning of the block's forward, so that activation checkpointing meets the same ones.
    """
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, TimmDropPath):
                layer = DropPath(child.drop_prob).train(child.training)
                layer.counts_calls = True
                setattr(part, name, layer)
                part.register_forward_pre_hook(layer.start_block)
    found = [part for part in module.modules() if isinstance(part, DropPath)]
    for number, part in enumerate(found):
        part.number = number
    return found


def raise_linearly(blocks: Sequence[nn.Module]) -> None:
    """Let the probability rise over the blocks from 0 to what it is in the last (Huang et al. 2016, section 3)."""
    for number, block in enumerate(blocks):
        for layer in (part for part in block.modules() if isinstance(part, DropPath)):
            layer.drop_prob *= number / max(1, len(blocks) - 1)


def set_drop_path_keys(layers: Iterable[DropPath], keys: Tensor | None) -> None:
    """The keys of the next forward's samples, int64 [B] on the module's device."""
    for layer in layers:
        layer.keys = keys


def _shifted(words: Tensor, bits: int) -> Tensor:
    """A logical shift to the right: torch's keeps the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
