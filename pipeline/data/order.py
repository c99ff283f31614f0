"""Which sample comes when: a pure function of (seed, epoch, position), the same for every world size.

An epoch is a sequence of all samples. Step k takes its k-th slice, as long as the global batch; rank r of R takes the
r-th part of that. Here the sequence is a permutation of all samples, a Feistel network over the next power of two,
walked until it lands inside (Black & Rogaway 2002, "Ciphers with arbitrary finite domains"), so that a step is
computed by itself. `pipeline.data.paged` has the other sequence, for data larger than memory.

With repeats each sample stands in a batch several times, as so many views of it (Hoffer et al. 2020, "Augment your
batch"; Berman et al. 2019, "MultiGrain"), and an epoch of as many steps sees the fewer samples. A view is numbered
sample + count x view, its draw, by which everything random about it is keyed.
"""

from typing import Any, Protocol

import numpy as np

from pipeline.data.compiled import inlined, jit
from pipeline.data.random import ORDER, key, scramble

_scramble: Any = inlined(scramble.py_func)  # part of its caller's loop


class Order(Protocol):
    """The draws of a training split, step by step."""

    def step(self, epoch: int, step: int) -> np.ndarray:
        """The draws of one step of an epoch, those of rank 0 first: int64 [global_batch]."""

    def coming(self, epoch: int, step: int, is_first: bool, rank: int, world: int) -> np.ndarray:
        """Which bytes of the file a rank should ask the disk for in this step: int64 [n, 2], start and stop.

        `is_first`: no step of this epoch was read before.
        """


class RandomOrder:
    """Every epoch another permutation of all samples."""

    def __init__(self, count: int, global_batch: int, seed: int, repeats: int = 1):
        self.count, self.global_batch, self.seed, self.repeats = count, global_batch, seed, repeats

    def step(self, epoch: int, step: int) -> np.ndarray:
        places, views = split_views(step * self.global_batch, self.global_batch, self.repeats)
        return shuffled(places, self.count, key(self.seed, epoch, self.count, ORDER)) + self.count * views

    def coming(self, epoch: int, step: int, is_first: bool, rank: int, world: int) -> np.ndarray:
        """None: the whole file is taken to be in memory."""
        return np.empty((0, 2), np.int64)


def steps_per_epoch(count: int, global_batch: int) -> int:
    """Whole global batches in `count` samples, with repeats too. The rest of an epoch's sequence is left out of it.

    timm's RepeatAugSampler has as many, but that it first cuts `count` to a multiple of 256: the same for a global
    batch that 256 divides.
    """
    return count // global_batch


def split_views(first: int, length: int, repeats: int) -> tuple[np.ndarray, np.ndarray]:
    """Which place of the sequence each of `length` draws from number `first` on shows, and which view: int64 each.

    Each place is shown `repeats` times in succession; within the run the draws are put in the order of their views,
    so that views of one sample do not lie side by side, to be mixed with each other.
    """
    draws = np.arange(first, first + length, dtype=np.int64)
    views = draws % repeats
    arranged = np.argsort(views, kind="stable") if repeats > 1 else slice(None)
    return draws[arranged] // repeats, views[arranged]


def evaluation_samples(count: int, rank: int, world: int) -> np.ndarray:
    """The samples of one rank, each sample on exactly one rank: int64, of a length that may differ by one."""
    return np.arange(rank, count, world, dtype=np.int64)


@inlined
def _feistel(word, rounds, bits):
    """A bijection of the words of `bits` bits."""
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


@jit("int64[::1](int64[::1], int64, uint64)")
def shuffled(places, count, stream):
    """What stands at `places`, int64 [n], of the permutation of range(count) that belongs to the stream."""
    bits = 2
    while (1 << bits) < count:
        bits += 1
    rounds = np.empty(8, np.uint64)
    for r in range(8):
        rounds[r] = scramble(stream + np.uint64(r))

    # All at once, then again those that landed outside: LLVM makes vectors of loops without branches, eight times
    # as fast as sample by sample.
    words = np.empty(len(places), np.uint64)
    for i in range(len(places)):
        words[i] = _feistel(np.uint64(places[i]), rounds, bits)
    outside = np.flatnonzero(words >= np.uint64(count))
    while len(outside):
        again = words[outside]
        for i in range(len(again)):
            again[i] = _feistel(again[i], rounds, bits)
        words[outside] = again
        outside = outside[again >= np.uint64(count)]
    return words.view(np.int64)
