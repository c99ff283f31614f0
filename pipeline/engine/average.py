"""The exponential moving average of the weights, and evaluating with other weights than the trained ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from pipeline.recipe.train import TrainSection


class Ema:
    """The average of what this rank has of the weights, shards or slices as they are: nothing is ever gathered."""

    def __init__(self, train: TrainSection, weights: Sequence[torch.Tensor]):
        assert train.ema_decay is not None
        self.decay, self.warmup = train.ema_decay, train.ema_warmup
        device = "cpu" if train.ema_device == "cpu" else None
        self.tensors = [weight.detach().to(device, torch.float32, copy=True) for weight in weights]
        self.updates = 0

    @torch.no_grad()
    def update(self, weights: Sequence[torch.Tensor]) -> None:
        """Once after each optimiser step."""
        self.updates += 1
        share = 1 - ema_decay(self.updates, self.decay, self.warmup)
        here = [w.to(kept.device, torch.float32) for w, kept in zip(weights, self.tensors, strict=True)]
        torch._foreach_lerp_(self.tensors, here, share)


def ema_decay(update: int, decay: float, warmup: bool) -> float:
    """The decay of the `update`-th update, counted from 1: timm's (`ModelEmaV3`), whose first takes the weights over.

    The warm-up goes like 1 - update^(-2/3) until it reaches `decay`.
    """
    if update <= 1:
        return 0.0
    return min(decay, 1 - update ** (-2 / 3)) if warmup else decay


@contextmanager
@torch.no_grad()
def swapped(weights: Sequence[torch.Tensor], others: Sequence[torch.Tensor], publish: Callable[[], None]) -> Iterator:
    """While open `weights` hold what `others` held, and the reverse; `publish` tells the module. Bits survive."""
    _swap(weights, others)
    publish()
    try:
        yield
    finally:
        _swap(weights, others)
        publish()


def _swap(weights: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for one, other in zip(weights, others, strict=True):
            before = one.clone()
            one.copy_(other)
            other.copy_(before)
