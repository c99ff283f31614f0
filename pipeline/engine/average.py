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
        self.updates = self.tensors[0].new_zeros((), dtype=torch.float64)

    @torch.no_grad()
    def update(self, weights: Sequence[torch.Tensor], stepped: torch.Tensor) -> None:
        """Average in the weights, after each optimizer step; nothing changes unless the bool tensor [] is true."""
        stepped = stepped.to(self.updates.device)
        self.updates += stepped
        share = torch.where(stepped, 1 - ema_decay(self.updates, self.decay, self.warmup), 0).float()
        current = [w.to(average.device, torch.float32) for w, average in zip(weights, self.tensors, strict=True)]
        torch._foreach_lerp_(self.tensors, current, [share.expand_as(average) for average in self.tensors])


def ema_decay(update: torch.Tensor, decay: float, warmup: bool) -> torch.Tensor:
    """The decay of update number `update`, counted from 1, as in timm's `ModelEmaV3`: 0 for the first.

    With `warmup` it is 1 - update^(-2/3) until that reaches `decay`. `update` and the result are float64 of no
    dimension, on the device, so that a step that may have been skipped there can be counted without waiting for it.
    """
    later = (1 - update ** (-2 / 3)).clamp(max=decay) if warmup else torch.full_like(update, decay)
    return torch.where(update > 1, later, 0.0)


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
