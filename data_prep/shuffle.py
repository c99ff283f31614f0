"""The order in which a training split is stored.

Sources in class folders list one class after the other. A file in that order has one class on each page, and readers
that shuffle windows of pages (data.order paged, FFCV's QUASI_RANDOM) get batches of few classes: over 20 steps of
1,024 ImageNet images the variance of the classes' counts is 4.6 times that of a uniform shuffle. In a file that is
stored shuffled, as `widemix prep` does by default, it is 1.0 times.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from widemix.data_prep.samples import Dataset, Sample
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.subset import Subset


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
