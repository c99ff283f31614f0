"""The training batches that somebody else's loop takes from our loaders."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

import widemix


class Stopped(Exception):
    """In the place of a signal, or of a lost node."""


@contextmanager
def seen_batches(stop_after: int = 0) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """A list of every batch that a training loader yields; the one after `stop_after` raises `Stopped`, once."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    real, stops = widemix.Loader.__iter__, [stop_after]

    def spy(loader: widemix.Loader) -> Any:
        for images, targets in real(loader):
            if loader.is_training:
                if stops[:1] == [len(seen)] and stops.pop():
                    raise Stopped
                seen.append((images.clone(), targets.clone()))
            yield images, targets

    with patch.object(widemix.Loader, "__iter__", spy):
        yield seen


def same(one: Sequence[Sequence[torch.Tensor]], other: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether batches are equal, tensor by tensor."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) for batch, twin in pairs for a, b in zip(batch, twin, strict=True))
