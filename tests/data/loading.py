"""Sections, loaders and batches that the tests of this room build from the few keys they care about."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from tests.sections import train_section
from widemix.data.batches import Batch
from widemix.data.loader import EvalLoader, TrainLoader
from widemix.distributed.topology import Topology
from widemix.formats.beton import open_beton
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import AnyDataSection, DataSection, TextDataSection

BATCH = 24
PLAIN = AugmentSection()
FULL = AugmentSection(
    auto_augment="rand-m9-mstd0.5-inc1",
    color_jitter=(0.4, 0.4, 0.4, 0.1),
    gaussian_blur_prob=0.3,
    re_prob=0.5,
    mixup=0.8,
    cutmix=1.0,
    mix_group=2,
    smoothing=0.1,
)
SMOOTH = AugmentSection(smoothing=0.1)
DAMAGED = 11, 30, 31  # samples of train
VALUES = ("inputs", "targets", "keys", "samples", "replaced")  # of a batch


def place(rank: int = 0, world: int = 1, device: str = "cpu") -> Topology:
    """Each rank on a machine of its own."""
    return Topology(rank, world, 0, 1, torch.device(device))


def section(folder: Path, **keys) -> DataSection:
    return DataSection(path=str(folder), **{"num_classes": 2, "image_size": 24, "workers": 1, **keys})


def text_section(folder: Path, **keys) -> TextDataSection:
    return TextDataSection(kind="text", path=str(folder), eval_split="dev_matched", num_classes=3, **keys)


def train_loader(data: AnyDataSection, augment=PLAIN, topology=None, train=None, **keys) -> TrainLoader:
    return TrainLoader(data, augment, train or train_section(BATCH, seed=7), topology or place(), **keys)


def read(loader: TrainLoader | EvalLoader, *start: int) -> list[Batch]:
    """The batches of an epoch and from a step on, or of an evaluation from a step on; by default of the first."""
    with loader.batches(*(start or [0])) as batches:
        return list(batches)


def steps(data: AnyDataSection, augment=PLAIN, world=1, accum=1, start=(1, 0)) -> list[dict[str, torch.Tensor]]:
    """What the batches of each step hold: its micro-batches one after the other, each of all ranks together."""
    train = train_section(BATCH, accum, 7)
    ranks = [read(train_loader(data, augment, place(rank, world), train), *start) for rank in range(world)]
    micro_batches = list(zip(*ranks, strict=True))
    parts = [sum(micro_batches[first : first + accum], ()) for first in range(0, len(micro_batches), accum)]
    return [{name: torch.cat([value(part, name) for part in step]) for name in VALUES} for step in parts]


def value(batch: Batch, name: str) -> torch.Tensor:
    found = getattr(batch, name)
    return found if isinstance(found, torch.Tensor) else torch.from_numpy(np.atleast_1d(found))


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    """Whether steps are equal, bit for bit, and in all of them as many samples were replaced."""
    for first, second in zip(one, other, strict=True):
        assert first["replaced"].sum() == second["replaced"].sum()
        assert all(torch.equal(first[name], second[name]) for name in VALUES[:-1])
    return True


def damage(folder: Path, *samples: int, split: str = "train") -> None:
    """Write zeros over the first bytes of these samples."""
    path = folder / f"{split}.beton"
    beton, written = open_beton(path), np.memmap(path, np.uint8, "r+")
    for sample in samples:
        written[int(beton.offset[sample]) :][:64] = 0


@contextmanager
def no_thread_is_left() -> Iterator[None]:
    """All threads that begin in this block end, at the latest when they see that nobody wants more."""
    before, deadline = set(threading.enumerate()), time.monotonic() + 300
    yield
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before
