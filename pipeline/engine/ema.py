"""The exponential moving average of the weights, and evaluating with other weights than the trained ones."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from widemix.recipe.sections import TrainSection


class Ema:
    """The average of this rank's local tensors (see `interface.Engine`) of the weights: nothing is ever gathered.

    Where it is in host memory and the weights are not (`train.ema_device`), they are copied there behind the step,
    and a thread averages them while the device computes the next one; `tensors` and `updates` wait for it. `behind`:
    whether that is so.
    """

    def __init__(self, train: TrainSection, weights: Sequence[torch.Tensor]):
        assert train.ema_decay is not None
        self.decay, self.warmup = train.ema_decay, train.ema_warmup
        device = "cpu" if train.ema_device == "cpu" else None
        self._tensors = [weight.detach().to(device, torch.float32, copy=True) for weight in weights]
        self._updates = self._tensors[0].new_zeros((), dtype=torch.float64)
        self.behind = any(one.device != other.device for one, other in zip(weights, self._tensors, strict=True))
        self._copies: list[torch.Tensor] = []  # of the last step's weights
        self._thread = ThreadPoolExecutor(1, "average")
        self._averaging: Future[None] | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The averages in the order of the weights, fp32, on their device or on the CPU."""
        self._finish()
        return self._tensors

    @property
    def updates(self) -> torch.Tensor:
        """How many steps were averaged: float64 []."""
        self._finish()
        return self._updates

    def update(self, weights: Sequence[torch.Tensor], stepped: torch.Tensor) -> None:
        """Average in the weights, after each optimizer step; nothing changes unless the bool tensor [] is true."""
        if not self.behind:
            self._average(weights, stepped)
            return
        self._finish()
        sources = [*weights, stepped]
        if not self._copies:
            pinned = any(source.is_cuda for source in sources)
            self._copies = [torch.empty_like(source, device="cpu", pin_memory=pinned) for source in sources]
        for copied, source in zip(self._copies, sources, strict=True):
            copied.copy_(source, non_blocking=True)
        event = torch.get_device_module(stepped.device).Event() if stepped.is_cuda else None
        if event:
            event.record()
        self._averaging = self._thread.submit(self._average_copies, event)

    def _average_copies(self, event: torch.Event | None) -> None:
        """In the thread."""
        if event:
            event.synchronize()
        *weights, stepped = self._copies
        self._average(weights, stepped)

    def _finish(self) -> None:
        if self._averaging:
            self._averaging.result()
            self._averaging = None

    @torch.no_grad()
    def _average(self, weights: Sequence[torch.Tensor], stepped: torch.Tensor) -> None:
        stepped = stepped.to(self._updates.device)
        self._updates += stepped
        fraction = torch.where(stepped, 1 - ema_decay(self._updates, self.decay, self.warmup), 0).float()
        current = [w.to(average.device, torch.float32) for w, average in zip(weights, self._tensors, strict=True)]
        fractions = [fraction.to(average.device).expand_as(average) for average in self._tensors]
        torch._foreach_lerp_(self._tensors, current, fractions)


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

    `sync_module` is called after each change (`interface.Engine.sync_module`).
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
