"""Metrics that are sums over the samples of all ranks, with the `update` and `compute` of torchmetrics' metrics.

Importing torchmetrics takes half as long as importing torch: it brings SciPy's signals, matplotlib and more.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def gather(values: Tensor) -> Tensor:
    """Return the values of all P ranks, [P, ...], where they have the same shape on each."""
    if not dist.is_initialized():
        return values[None]
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.stack(parts)


def concatenate(rows: Tensor) -> Tensor:
    """Return the rows of all ranks, [N, ...], one rank's after the other's; their number may differ."""
    counts = gather(torch.tensor(len(rows), device=rows.device)).tolist()
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    return torch.cat([part[:count] for part, count in zip(gather(padded), counts, strict=True)])


class Sums:
    """Sums of what each batch adds to `sums`; `compute` returns those of all ranks together."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.sums = torch.zeros(shape, dtype=dtype, device=device)

    def compute(self) -> Tensor:
        """Return the sums over all ranks. Every rank calls it."""
        return gather(self.sums).sum(0)


class Mean(Sums):
    """The mean of a value of each sample, nan if one is; summed in `dtype`."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu"):
        super().__init__(dtype=dtype, device=device)
        self.count = 0

    def update(self, values: Tensor) -> None:
        """Add a batch: [B], or more values of each sample."""
        self.sums += values.sum()
        self.count += values.numel()

    def compute(self) -> Tensor:
        """Return the mean over all ranks."""
        return super().compute() / gather(torch.tensor(self.count, device=self.sums.device)).sum()


class MeanAbsoluteError(Mean):
    """The mean of the absolute errors."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch: both [B, N]."""
        super().update((outputs - targets).abs())


class Accuracy(Mean):
    """The fraction of samples whose class is among the k likeliest."""

    def __init__(self, k: int, device: torch.device | str = "cpu"):
        super().__init__(torch.float64, device)  # in which a count of samples is exact
        self.k = k

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits [B, classes], labels int64 [B]."""
        likeliest = logits.argmax(1, keepdim=True) if self.k == 1 else logits.topk(self.k, dim=1).indices
        super().update((likeliest == labels[:, None]).any(1))


class Confusion(Sums):
    """The number of samples by true and by predicted class, int64 [classes, classes]."""

    def __init__(self, classes: int, device: torch.device | str = "cpu"):
        super().__init__(classes, classes, dtype=torch.int64, device=device)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits [B, classes], labels int64 [B]."""
        pairs = labels * len(self.sums) + logits.argmax(1)
        self.sums += torch.bincount(pairs, minlength=self.sums.numel()).view_as(self.sums)
