"""The training loader as a contestant: whole epochs of it, on one rank of a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from widemix.data.images import View
from widemix.data.loader import TrainLoader
from widemix.distributed.topology import Topology
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection
from widemix.recipe.train import TrainSection


@dataclass(frozen=True)
class Epochs:
    """A contestant that reads an epoch from each of its loaders; its units are samples."""

    loaders: Sequence[TrainLoader]

    def __call__(self, number: int) -> int:
        """Read the epoch of this number."""
        return sum(_samples(loader, number) for loader in self.loaders) // len(self.loaders)


def data_of(folder: Path, side: int, threads: int = 1) -> DataSection:
    """What is read of a prepared folder of ImageNet."""
    return DataSection(path=str(folder), num_classes=1000, image_size=side, workers=threads)


def training_loader(
    data: DataSection, augment: AugmentSection, batch: int, views: Sequence[View] = ()
) -> TrainLoader:
    """The training loader itself, prefetch thread and soft targets included."""
    train, topology = TrainSection(epochs=1, global_batch=batch), Topology(0, 1, 0, 1, torch.device("cpu"))
    return TrainLoader(data, augment, train, topology, views=views)


def _samples(loader: TrainLoader, epoch: int) -> int:
    with loader.batches(epoch) as batches:
        return sum(len(batch) for batch in batches)
