"""Which samples of a training split are stored, and in which order.

Subsets for data-scaling studies are seeded, stratified by class, and nested: all training samples are put in one
order. A fraction is its head, the held-out part its tail. Of two fractions with the same seed the smaller therefore
lies within the larger, and neither overlaps the held-out part.

Sources in class folders list one class after the other. A file in that order has one class on each page, and readers
that shuffle windows of pages (data.order paged, FFCV's QUASI_RANDOM) get batches of few classes: over 20 steps of
1,024 ImageNet images the variance of the classes' counts is 4.6 times that of a uniform shuffle. In a file that is
stored shuffled, as `widemix prep` does by default, it is 1.0 times.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from widemix.data_prep.samples import Dataset, Sample
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError


@dataclass(frozen=True)
class Subset(Sequence[Any]):
    """The samples at `indices`, or what else is one after the other."""

    samples: Sequence[Any]
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index):
        return self.samples[self.indices[index]]


def take_subset(dataset: Dataset, settings: PrepSettings) -> Dataset:
    """The dataset with `train` reduced to `fraction` or `per_class`, and a fraction of it as the split `holdout`.

    Raises `InputError` if a class or the whole split has too few samples, or the source has a `holdout` already.
    """
    if not settings.reduces_train:
        return dataset
    if "train" not in dataset.splits:
        raise InputError("fraction, per_class and holdout need a split train, and the source has none")
    if settings.per_class and dataset.targets:
        raise InputError(f"per_class {settings.per_class}: the samples have targets and no classes; take a fraction")
    if settings.holdout and "holdout" in dataset.splits:
        raise InputError(f"holdout {settings.holdout}: the source has a split holdout already; leave it out")
    train = dataset.splits["train"]
    order = stratified_order(train, settings.seed)
    held = round(settings.holdout * len(order))
    kept, tail = order[: len(order) - held], order[len(order) - held :]
    if settings.per_class:
        kept = _per_class(train, kept, settings.per_class, dataset.classes)
    else:
        kept = kept[: round(settings.fraction * len(kept))]
    if not kept:
        fractions = f"fraction {settings.fraction} and holdout {settings.holdout}"
        raise InputError(f"{fractions} leave none of {len(train)} training samples")
    if settings.holdout and not tail:
        raise InputError(f"holdout {settings.holdout} of {len(train)} training samples is less than one")
    splits = {**dataset.splits, "train": Subset(train, sorted(kept))}
    if tail:
        splits["holdout"] = Subset(train, sorted(tail))
    return replace(dataset, splits=splits)


def stratified_order(samples: Sequence[Sample], seed: int) -> list[int]:
    """All indices in an order whose every head holds the same fraction of each class, to within one sample.

    Within a class the order is that of a hash of (seed, name), which depends neither on a library's random generator
    nor on the other samples.
    """
    by_class = defaultdict(list)
    for index, sample in enumerate(samples):
        digest = hashlib.blake2b(f"{seed}\0{sample.name}".encode("utf-8", "surrogateescape"), digest_size=8)
        by_class[sample.label].append((digest.digest(), index))
    placed = []
    for label, members in by_class.items():
        for rank, (_, index) in enumerate(sorted(members)):
            placed.append(((rank + 0.5) / len(members), label, index))
    return [index for _, _, index in sorted(placed)]


def _per_class(samples: Sequence[Sample], order: Sequence[int], count: int, classes: Sequence[str]) -> list[int]:
    by_class: dict[int, list[int]] = {sample.label: [] for sample in samples}
    for index in order:
        by_class[samples[index].label].append(index)
    for label, members in by_class.items():
        if len(members) < count:
            raise InputError(f"per_class {count}: class {classes[label]} has {len(members)} samples")
    return [index for members in by_class.values() for index in members[:count]]


def shuffle_train(dataset: Dataset, settings: PrepSettings) -> Dataset:
    """The dataset with `train` in a random order, if `settings.shuffle` and its classes come one after the other."""
    train = dataset.splits.get("train")
    if not settings.shuffle or dataset.text or train is None or not _is_sorted(train):
        return dataset
    return replace(
        dataset, splits={**dataset.splits, "train": Subset(train, shuffled_order(train, settings.seed).tolist())}
    )


def shuffled_order(samples: Sequence[Sample], seed: int) -> np.ndarray:
    """The indices of all samples in the order of a hash of (seed, name): int64 [n].

    It depends neither on a library's random generator nor, for any two samples, on the others.
    """
    words = np.empty(len(samples), np.uint64)
    for index, sample in enumerate(samples):
        name = f"shuffle\0{seed}\0{sample.name}".encode("utf-8", "surrogateescape")
        words[index] = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    return np.argsort(words, kind="stable")


def _is_sorted(samples: Sequence[Sample]) -> bool:
    """Whether there are several classes, and they come one after the other."""
    labels = (sample.label for sample in samples)
    return all(a <= b for a, b in pairwise(labels)) and samples[0].label < samples[len(samples) - 1].label
