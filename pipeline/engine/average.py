"""The exponential moving average of the weights, and evaluating with other weights than the trained ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from pipeline.recipe.train import TrainSection


class Ema:
    """The average of this rank's local tensors (see `contract.Engine`) of the weights: nothing is ever gathered.

    `tensors` are in the order of the weights, fp32, on their device or on the CPU (`train.ema_device`).
    """

    def __init__(self, train: TrainSection, weights: Sequence[torch.Tensor]):
        assert train.ema_decay is not None
        self.decay, self.warmup = train.ema_decay, train.ema_warmup
        device = "cpu" if train.ema_device == "cpu" else None
        self.tensors = [weight.detach().to(device, torch.float32, copy=True) for weight in weights]
        self.updates = 0

    @torch.no_grad()
    def update(self, weights: Sequence[torch.Tensor]) -> None:
        """Average in the weights, after each optimizer step."""
        self.updates += 1
        share = 1 - ema_decay(self.updates, self.decay, self.warmup)
        current = [w.to(average.device, torch.float32) for w, average in zip(weights, self.tensors, strict=True)]
        torch._foreach_lerp_(self.tensors, current, share)


def ema_decay(update: int, decay: float, warmup: bool) -> float:
    """The decay of update number `update`, counted from 1, as in timm's `ModelEmaV3`: 0 for the first.

    With `warmup` it is 1 - update^(-2/3) until that reaches `decay`.
    """
    if update <= 1:
        return 0.0
    return min(decay, 1 - update ** (-2 / 3)) if warmup else decay


@contextmanager
@torch.no_grad()
def swapped(
    weights: Sequence[torch.Tensor], others: Sequence[torch.Tensor], sync_module: Callable[[], None]
) -> Iterator[None]:
    """A context in which `weights` and `others` have each other's values; after it they are as before, bit by bit.

    `sync_module` is called after each change (`contract.Engine.sync_module`).
    """
    _swap(weights, others)
    sync_module()
    try:
        yield
    finally:
        _swap(weights, others)
        sync_module()


@torch.no_grad()
def _swap(weights: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    for one, other in zip(weights, others, strict=True):
        before = one.clone()
        one.copy_(other)
        other.copy_(before)
