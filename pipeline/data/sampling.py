"""What an epoch has with `data.sampling`: classes as often as their weights say, in place of each sample once.

The samples of a class are one sequence over all epochs: a permutation of them, then another one, and so on, of which
each epoch takes the next ones. So all of a large class, of which an epoch has a part, is met before any of it comes
again; and a small one has each of its samples as often. The number that an epoch takes of a class is rounded up in
some epochs and down in others: after `CYCLE` epochs it is exact. All of it is a function of seed and epoch.

A sample that an epoch has several times is another view each time, see `widemix.data.order`.
"""

import functools
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from widemix.data.compiled import jit
from widemix.data.order import RandomOrder, shuffled, shuffled_each
from widemix.data.random import CLASS, ORDER, key

CYCLE, _STRIDE = 64, 39  # near 64 / the golden ratio: epochs that round up are spread over the cycle


class Weighted(NamedTuple):
    """The label of each sample, int [n], and how often a sample of each class is sampled: float [classes]."""

    label: np.ndarray
    weight: np.ndarray


class ClassSampling:
    """The samples of epochs of `length` places, by class. `repeats`: views of each place."""

    def __init__(self, weighted: Weighted, length: int, seed: int, repeats: int):
        self.length, self.seed, self.repeats = length, seed, repeats
        self._sorted = np.argsort(weighted.label, kind="stable")  # class by class
        self._counts = np.bincount(weighted.label, minlength=len(weighted.weight))
        self._first = np.cumsum(self._counts) - self._counts  # where a class begins in it
        ends = np.cumsum(weighted.weight * self._counts)
        # Where classes end in a cycle: the same integers also where a weight is rounded in another way.
        self._ends = np.floor(CYCLE * length * (ends / ends[-1]) + 1e-3).astype(np.int64)

    def view_ids(self, slots: np.ndarray, epoch: int) -> np.ndarray:
        """The view ids at these slots, int64 [n], of an epoch's `length`, which has one class after the other."""
        taken, ends = self._taken(epoch), np.cumsum(self._taken(epoch + 1) - self._taken(epoch))
        label = np.searchsorted(ends, slots, side="right")
        number = slots - np.append(0, ends)[label] + taken[label]  # in the sequence of the class
        counts = self._counts[label]
        rounds, places = np.divmod(number, counts)
        samples = self._sorted[self._first[label] + shuffled_each(places, counts, _streams(self.seed, rounds, label))]
        views = self.repeats * (rounds - taken[label] // counts)
        return samples + len(self._sorted) * views

    @functools.lru_cache(maxsize=4)  # noqa: B019  an order has one sampling all its life
    def _taken(self, epoch: int) -> np.ndarray:
        """How many samples of each class all epochs before this one have: int64 [classes]."""
        cycles, rest = divmod(epoch, CYCLE)
        shifts = np.arange(rest) * _STRIDE % CYCLE
        ends = cycles * self._ends + ((self._ends[:, None] + shifts) // CYCLE).sum(1)
        return np.diff(ends, prepend=0)


class SampledOrder(RandomOrder):
    """The samples of an epoch in random order. length: views of an epoch; the last step has what is left."""

    def __init__(self, weighted: Weighted, global_batch: int, seed: int, repeats: int, length: int):
        super().__init__(len(weighted.label), global_batch, seed, repeats)
        self._sampling = ClassSampling(weighted, -(-length // repeats), seed, repeats)

    @override
    def _samples(self, places: np.ndarray, epoch: int) -> np.ndarray:
        slots = shuffled(places, self._sampling.length, key(self.seed, epoch, self.count, ORDER))
        return self._sampling.view_ids(slots, epoch)


@jit
def _streams(seed, rounds, labels):
    """The random streams of rounds of classes: uint64 [n]."""
    streams = np.empty(len(rounds), np.uint64)
    for i in range(len(rounds)):
        streams[i] = key(seed, rounds[i], labels[i], CLASS)
    return streams
