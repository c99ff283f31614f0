"""Which sample comes when: a pure function of (seed, epoch, position), the same for every world size.

Epoch e is a permutation of all samples. Step k takes its k-th slice, as long as the global batch; rank r of R takes
the r-th part of that. The permutation is a Feistel network over the next power of two, walked until it lands inside
(Black & Rogaway 2002, "Ciphers with arbitrary finite domains"), so a rank computes its own slice and no more.
"""

import numpy as np

from pipeline.data.compiled import jit
from pipeline.data.random import ORDER, key, scramble

_ROUNDS = 8


def steps_per_epoch(count: int, global_batch: int) -> int:
    """Whole global batches in `count` samples. The rest of an epoch's permutation is left out of that epoch."""
    return count // global_batch


def step_samples(count: int, seed: int, epoch: int, step: int, global_batch: int) -> np.ndarray:
    """The samples of one step of an epoch, those of rank 0 first: int64 [global_batch]."""
    positions = np.arange(step * global_batch, (step + 1) * global_batch, dtype=np.int64)
    return shuffled(positions, count, seed, epoch)


def evaluation_samples(count: int, rank: int, world: int) -> np.ndarray:
    """The samples of one rank, each sample on exactly one rank: int64, of a length that may differ by one."""
    return np.arange(rank, count, world, dtype=np.int64)


def shuffled(positions: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """The samples at `positions` of the epoch's permutation of range(count)."""
    return _permute(np.ascontiguousarray(positions), count, key(seed, epoch, count, ORDER))


@jit("int64[::1](int64[::1], int64, uint64)")
def _permute(positions, count, stream):
    bits = 2
    while (1 << bits) < count:
        bits += 1
    right_bits = np.uint64(bits // 2)
    left_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    right_mask = np.uint64((1 << (bits // 2)) - 1)
    rounds = np.empty(_ROUNDS, np.uint64)
    for r in range(_ROUNDS):
        rounds[r] = scramble(stream + np.uint64(r))

    samples = np.empty_like(positions)
    for i in range(len(positions)):
        word = np.uint64(positions[i])
        while True:
            left, right = word >> right_bits, word & right_mask
            for r in range(0, _ROUNDS, 2):
                left ^= scramble(rounds[r] ^ right) & left_mask
                right ^= scramble(rounds[r + 1] ^ left) & right_mask
            word = (left << right_bits) | right
            if word < np.uint64(count):
                break
        samples[i] = np.int64(word)
    return samples
