"""Random numbers without state: a pure function of (seed, epoch, sample, use) and a counter.

The mixing function is the finaliser of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014). Whatever the thread, rank
or restart, the same sample in the same epoch draws the same numbers.
"""

import numpy as np

from pipeline.data.compiled import jit

# What a number is used for. One more use is one more line; a number is never used twice.
ORDER, CROP, FLIP, AUGMENT, ERASE, MIX, NETWORK, APPEARANCE, PAGE, WINDOW, INTERPOLATION, REPLACE = range(12)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)


@jit("uint64(uint64)")
def scramble(word):
    """A bijection of 64-bit words in which every input bit moves every output bit."""
    word = word + _GOLDEN
    word = (word ^ (word >> np.uint64(30))) * _M1
    word = (word ^ (word >> np.uint64(27))) * _M2
    return word ^ (word >> np.uint64(31))


@jit("uint64(uint64, uint64, uint64, uint64)")
def key(seed, epoch, sample, use):
    """The 64-bit stream of numbers that belongs to one use of one sample in one epoch."""
    word = scramble(seed)
    word = scramble(word ^ epoch)
    word = scramble(word ^ sample)
    return scramble(word ^ use)


@jit("float64(uint64, uint64)")
def uniform(stream, counter):
    """The `counter`-th number of a stream, in [0, 1) with 53 random bits."""
    return np.float64(scramble(stream + counter) >> np.uint64(11)) * (1.0 / 9007199254740992.0)
