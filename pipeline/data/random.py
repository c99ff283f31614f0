"""Counter-based random numbers: a pure function of (seed, epoch, sample, use) and a counter, without state.

The bit-mixing function is the finaliser of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014). The same sample in the same
epoch gets the same numbers on every thread, rank and restart.
"""

import numpy as np

from widemix.data.compiled import jit

# Uses of random numbers, each with streams of its own. Append new ones: the numbers are part of every run.
ORDER, CROP, FLIP, AUGMENT, ERASE, MIX, NETWORK, COLOR_JITTER, PAGE, WINDOW, INTERPOLATION = range(11)
REPLACE, DROPOUT, CLASS = range(11, 14)

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
M1 = np.uint64(0xBF58476D1CE4E5B9)
M2 = np.uint64(0x94D049BB133111EB)


@jit("uint64(uint64)")
def scramble(word):
    """A bijection of 64-bit integers in which every input bit affects every output bit."""
    word = word + GOLDEN
    word = (word ^ (word >> np.uint64(30))) * M1
    word = (word ^ (word >> np.uint64(27))) * M2
    return word ^ (word >> np.uint64(31))


@jit("uint64(uint64, uint64, uint64, uint64)")
def key(seed, epoch, sample, use):
    """The 64-bit key of the random stream for one use of one sample in one epoch."""
    word = scramble(seed)
    word = scramble(word ^ epoch)
    word = scramble(word ^ sample)
    return scramble(word ^ use)


@jit("float64(uint64, uint64)")
def uniform(stream, counter):
    """The `counter`-th number of a stream, in [0, 1) with 53 random bits."""
    return np.float64(scramble(stream + counter) >> np.uint64(11)) * (1.0 / 9007199254740992.0)
