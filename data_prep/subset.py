"""Parts of a training split for data-scaling studies: seeded, stratified by class, and nested.

One order of all training samples decides: a fraction is the head of it, the held-out part its tail. So of two
fractions with one seed the smaller lies within the larger, and neither ever touches the held-out part.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from data_prep.samples import Dataset, Sample
from data_prep.settings import PrepSettings
from pipeline.errors import InputError


@dataclass(frozen=True)
class Chosen(Sequence[Sample]):
    """Some of the samples, in their own order."""

    samples: Sequence[Sample]
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index):
        return self.samples[self.indices[index]]


def take_subset(dataset: Dataset, settings: PrepSettings) -> Dataset:
    """The dataset with `train` cut to `fraction` or `per_class`, and `holdout` of it as a split of that name."""
    if not settings.cut:
        return dataset
    if "train" not in dataset.splits:
        raise InputError("fraction, per_class and holdout cut the split train, and the source has none")
    train = dataset.splits["train"]
    order = stratified_order(train, settings.seed)
    held = round(settings.holdout * len(order))
    kept, tail = order[: len(order) - held], order[len(order) - held :]
    if settings.per_class:
        kept = _per_class(train, kept, settings.per_class, dataset.classes)
    else:
        kept = kept[: round(settings.fraction * len(kept))]
    if not kept:
        cuts = f"fraction {settings.fraction} and holdout {settings.holdout}"
        raise InputError(f"{cuts} leave none of {len(train)} training samples")
    if settings.holdout and not tail:
        raise InputError(f"holdout {settings.holdout} of {len(train)} training samples is none at all")
    splits = {**dataset.splits, "train": Chosen(train, sorted(kept))}
    if tail:
        splits["holdout"] = Chosen(train, sorted(tail))
    return replace(dataset, splits=splits)


def stratified_order(samples: Sequence[Sample], seed: int) -> list[int]:
    """All indices, shuffled by (seed, name), so that every head takes one share of each class, to within a sample.

    Names alone decide, not the generator of some library version, nor what else there is.
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
    by_class = defaultdict(list)
    for index in order:
        by_class[samples[index].label].append(index)
    for label, members in by_class.items():
        if len(members) < count:
            raise InputError(f"per_class {count}: class {classes[label]} has {len(members)} samples to take from")
    return [index for members in by_class.values() for index in members[:count]]
