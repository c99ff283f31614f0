"""What a forward pass changes in a network beside its output: the buffers in which batch norms keep statistics."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn


class ForwardBuffers:
    """The buffers of a network that a forward pass may change, and copies of them to go back to.

    They are those of floating point and the single numbers (counts). Larger tables of integers (permutations, offsets
    between tokens) are indices, which stay as they are. Nothing here waits for the device.
    """

    def __init__(self, module: nn.Module):
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for buffer in module.buffers():
            if buffer.is_floating_point() or buffer.numel() == 1:
                groups[buffer.device, buffer.dtype].append(buffer)
        self._groups = list(groups.values())

    def copy(self) -> list[torch.Tensor]:
        """The values that they have now, for `restore`."""
        return [torch.cat([buffer.reshape(-1) for buffer in group]) for group in self._groups]

    @torch.no_grad()
    def restore(self, copies: Sequence[torch.Tensor], unless: torch.Tensor | None = None) -> None:
        """Give them the values of `copies` again, unless the bool tensor [] `unless` is true."""
        if unless is not None:
            now = self.copy()
            copies = [torch.where(unless.to(n.device), n, c) for n, c in zip(now, copies, strict=True)]
        for group, values in zip(self._groups, copies, strict=True):
            parts = values.split([buffer.numel() for buffer in group])
            torch._foreach_copy_(group, [part.view(b.shape) for part, b in zip(parts, group, strict=True)])
