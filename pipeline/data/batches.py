"""What the loaders yield: batches, from a source of samples to the device.

One thread reads and decodes some batches ahead, another moves the next one to the device while the step computes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from widemix.data.device_transfer import on_side_stream, record_stream
from widemix.data.mixup import Mixture
from widemix.data.prefetch import Prefetch
from widemix.data.split import PreparedFile
from widemix.recipe.data import AnyDataSection


@dataclass(frozen=True)
class Batch:
    """A batch on the device.

    `inputs` are normalised images [B, 3, H, W] (channels last in memory) or token ids int64 [B, T];
    `targets` are probabilities [B, classes] in training, labels int64 [B] in evaluation; where
    `data.targets` is not class, the numbers to predict, float32 [B, targets].
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    samples: np.ndarray  # int64 [B]: the samples' numbers in the split
    replaced: int = 0  # how many of them replace one that cannot be read
    keys: torch.Tensor | None = (
        None  # int64 [B] on the device, of (seed, epoch, view id): stochastic depth samples by them
    )

    def __len__(self) -> int:
        return len(self.samples)


class Source(Protocol):
    """One split, as images or tokens: `read` by the background thread, `finish`ed on the device.

    Samples are given by view ids (see `widemix.data.order`): a view id modulo `len(file)` is the sample.
    """

    @property
    def file(self) -> PreparedFile:
        """The split's opened file."""

    @property
    def descriptor(self) -> int:
        """The descriptor by which its samples are read."""

    def read(self, view_ids: np.ndarray, step_view_ids: np.ndarray, epoch: int) -> tuple[torch.Tensor, np.ndarray]:
        """A batch on the host, and the view ids that it holds: others than requested where one was replaced.

        `step_view_ids` are those of the whole step, on all ranks.
        """

    def labels(self, view_ids: np.ndarray) -> torch.Tensor:
        """Labels int64 [B], or targets float32 [B, targets], on the host."""

    def finish(
        self,
        host: torch.Tensor,
        view_ids: np.ndarray,
        epoch: int,
        dtype: torch.dtype = torch.float32,
        mixture: Mixture | None = None,
    ) -> torch.Tensor:
        """The model's inputs on the device, from what `read` returned: images mixed and in this dtype, or ids."""

    def host_bytes(self, count: int) -> int:
        """Upper bound of the host memory of a batch of `count` samples."""


@dataclass(frozen=True)
class HostBatch:
    """A batch as the reading thread passes it on."""

    inputs: torch.Tensor
    labels: torch.Tensor
    view_ids: np.ndarray
    step: int  # over all epochs
    first: int  # place of its first sample in the step
    replaced: int = 0


class Batches:
    """Iterator over batches on the device, one ahead of the training step. Use it in a `with` block."""

    def __init__(self, hosts: Prefetch[HostBatch], finish: Callable[[HostBatch], Batch], device: torch.device):
        self._hosts, self._device = hosts, device
        self._ready: Prefetch[Batch] = Prefetch(on_side_stream(hosts, finish, device), ahead=1)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        self._hosts.check()
        batch = next(self._ready)
        record_stream(self._device, batch.inputs, batch.targets, *([] if batch.keys is None else [batch.keys]))
        return batch

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_) -> None:
        self._hosts.close()
        self._ready.close()

    @property
    def waited(self) -> float:
        """Seconds so far in which the step waited for a batch."""
        return self._ready.waited


def prefetch_count(data: AnyDataSection, source: Source, count: int) -> int:
    """How many batches of `count` samples to read ahead, within `data.prefetch_batches` and `data.prefetch_mib`."""
    return max(1, min(data.prefetch_batches, (data.prefetch_mib << 20) // source.host_bytes(count)))
