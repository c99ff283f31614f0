"""Sample order: a pure function of (seed, epoch, position), the same for every world size.

An epoch is a sequence of all samples. Step k takes its k-th slice, as long as the global batch. That slice is divided
into micro-batches, and each of these among the ranks (`rank_slices`): a micro-batch over all ranks, of which batch
norms take their statistics, has the same samples for every world size.

Here the sequence is a permutation of all samples: a Feistel network over the next power of two, applied again until
the result is in range (Black & Rogaway 2002, "Ciphers with arbitrary finite domains"), so that any step is computed
without the others. `widemix.data.paged` has the order for data larger than memory.

With repeated augmentation a batch holds several views of each sample (Hoffer et al. 2020, "Augment your batch";
Berman et al. 2019, "MultiGrain"), and an epoch of the same number of steps sees fewer samples. A view has the view id
sample + count x view (without repeats the sample's number), which keys all of its random numbers.

With `data.sampling` an epoch has classes as often as their weights say, in place of each sample once. The samples of
a class are one sequence over all epochs: a permutation of them, then another one, and so on, of which each epoch
takes the next ones. So all of a large class, of which an epoch has a part, is met before any of it comes again; and a
small one has each of its samples as often. The number that an epoch takes of a class is rounded up in some epochs and
down in others: after `CYCLE` epochs it is exact. A sample that an epoch has several times is another view each time.
"""

import functools
import itertools
from typing import Any, NamedTuple, Protocol

import numpy as np
from typing_extensions import override

from widemix.data.compiled import jit, jit_inline
from widemix.data.random import CLASS, ORDER, key, scramble

_scramble: Any = jit_inline(scramble.py_func)  # part of its caller's loop


class Order(Protocol):
    """The view ids of a training split, step by step."""

    def step(self, epoch: int, step: int) -> np.ndarray:
        """The view ids of one step of an epoch, which `rank_slices` divides: int64 [global_batch]."""

    def prefetch_ranges(self, epoch: int, step: int, is_first: bool, parts: list[slice]) -> np.ndarray:
        """The bytes of the file that a rank should request from the disk in this step: int64 [n, 2], start and stop.

        `is_first` is true for the first step that this process reads of the epoch; `parts` are the rank's parts of
        every step.
        """


class RandomOrder:
    """Another permutation of all samples in each epoch. `repeats`: views of each sample, see above."""

    def __init__(self, count: int, global_batch: int, seed: int, repeats: int = 1):
        self.count, self.global_batch, self.seed, self.repeats = count, global_batch, seed, repeats

    def step(self, epoch: int, step: int) -> np.ndarray:
        """The view ids of one step of an epoch: int64 [global_batch], or fewer in the last."""
        first = step * self.global_batch
        places, views = split_views(first, min(self.global_batch, self.count - first), self.repeats)
        return self._samples(places, epoch) + self.count * views

    def prefetch_ranges(self, epoch: int, step: int, is_first: bool, parts: list[slice]) -> np.ndarray:
        """No ranges: the file is expected to fit into memory."""
        return np.empty((0, 2), np.int64)

    def _samples(self, places: np.ndarray, epoch: int) -> np.ndarray:
        """The samples at these places of the epoch's sequence."""
        return shuffled(places, self.count, key(self.seed, epoch, self.count, ORDER))


class FileOrder(RandomOrder):
    """Every epoch in the order of the file, in place of a permutation."""

    @override
    def _samples(self, places: np.ndarray, epoch: int) -> np.ndarray:
        return places


def steps_per_epoch(count: int, global_batch: int, drop_last: bool = True) -> int:
    """Global batches in `count` samples, also with repeats; what does not fill the last one is dropped or one more.

    timm's RepeatAugSampler first cuts `count` to a multiple of 256, which gives the same number of steps for a global
    batch that 256 divides.
    """
    return count // global_batch if drop_last else -(-count // global_batch)


def rank_slices(length: int, rank: int, world: int, grad_accum_steps: int) -> list[slice]:
    """The parts of a step of `length` samples that one rank takes, one for each micro-batch; sizes differ by one.

    Micro-batch k of all ranks together is the k-th part of the step, those of rank 0 first.
    """
    cuts = [length * number // grad_accum_steps for number in range(grad_accum_steps + 1)]
    return [
        slice(*(first + (stop - first) * part // world for part in (rank, rank + 1)))
        for first, stop in itertools.pairwise(cuts)
    ]


def split_views(first: int, length: int, repeats: int) -> tuple[np.ndarray, np.ndarray]:
    """Places in the sequence and views, int64 [length] each, of the `length` positions from `first` on.

    Each place is repeated `repeats` times in succession. The positions are then sorted by view, so that two views of
    one sample are not neighbours, which mixup and CutMix would mix with each other.
    """
    positions = np.arange(first, first + length, dtype=np.int64)
    views = positions % repeats
    arranged = np.argsort(views, kind="stable") if repeats > 1 else slice(None)
    return positions[arranged] // repeats, views[arranged]


def evaluation_samples(count: int, rank: int, world: int) -> np.ndarray:
    """The samples of one rank, int64 [n], where n may differ by one between ranks: each sample is on exactly one."""
    return np.arange(rank, count, world, dtype=np.int64)


@jit_inline
def _feistel(word, rounds, bits):
    """A bijection of integers of `bits` bits."""
    right_bits = np.uint64(bits // 2)
    left_mask = (np.uint64(1) << np.uint64(bits - bits // 2)) - np.uint64(1)
    right_mask = (np.uint64(1) << right_bits) - np.uint64(1)
    left, right = word >> right_bits, word & right_mask
    left ^= _scramble(rounds[0] ^ right) & left_mask
    right ^= _scramble(rounds[1] ^ left) & right_mask
    left ^= _scramble(rounds[2] ^ right) & left_mask
    right ^= _scramble(rounds[3] ^ left) & right_mask
    left ^= _scramble(rounds[4] ^ right) & left_mask
    right ^= _scramble(rounds[5] ^ left) & right_mask
    left ^= _scramble(rounds[6] ^ right) & left_mask
    right ^= _scramble(rounds[7] ^ left) & right_mask
    return (left << right_bits) | right


@jit
def _permute(words, length, rounds, bits):
    """Replace the first `length` words by their images. LLVM vectorises it: eight times as fast as one at a time."""
    for i in range(length):
        words[i] = _feistel(words[i], rounds, bits)


@jit_inline
def _set_rounds(rounds, count, stream):
    """Set the keys of the network's rounds, uint64 [8]; returns the bits of its integers."""
    for r in range(8):
        rounds[r] = _scramble(stream + np.uint64(r))
    bits = 2
    while (1 << bits) < count:
        bits += 1
    return bits


@jit
def shuffled_each(places, counts, streams):
    """For each i the element at places[i] of the permutation of range(counts[i]) that streams[i] defines."""
    found, rounds = np.empty(len(places), np.int64), np.empty(8, np.uint64)
    for i in range(len(places)):
        bits = _set_rounds(rounds, counts[i], streams[i])
        word = _feistel(np.uint64(places[i]), rounds, bits)
        while word >= np.uint64(counts[i]):
            word = _feistel(word, rounds, bits)
        found[i] = word
    return found


@jit("int64[::1](int64[::1], int64, uint64)")
def shuffled(places, count, stream):
    """The elements at `places`, int64 [n], of the permutation of range(count) that the random stream defines."""
    rounds = np.empty(8, np.uint64)
    bits = _set_rounds(rounds, count, stream)

    # All at once, then again those out of range, until none is. In loops: numba takes five seconds for the first
    # expression or assignment of whole arrays, as it compiles the texts of errors about shapes.
    words = places.astype(np.uint64)
    again, outside, length = words.copy(), np.arange(len(words)), len(words)
    while length:
        _permute(again, length, rounds, bits)
        kept = 0
        for i in range(length):
            words[outside[i]] = again[i]
            if again[i] >= np.uint64(count):
                again[kept], outside[kept] = again[i], outside[i]
                kept += 1
        length = kept
    return words.view(np.int64)


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
