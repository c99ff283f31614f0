"""Sentence pairs whose class depends on words that are far apart, for Navon & Bronstein's question (no download).

Each sentence has seven of eight words that stand in a circle. Word i of the second follows word i of the first if it
is up to three places after it; the class is whether more of the seven follow than do not. A word follows half of all
words, so neither sentence says anything by itself, nor do any counts of words; the sum over the seven pairs of a
table of both words says all of it. As a function of the two sentences that sum has a separation rank of at least
four, that of the table.
"""

import numpy as np

from widemix.data_prep.pairs import Pair, Pairs
from widemix.data_prep.samples import Dataset

PAIRS, WORDS = 7, "abcdefgh"
_SEEDS = {"train": (0, 20_000), "test": (1, 5_000)}  # and how many


def read(origin: None) -> Dataset:
    """20,000 training and 5,000 test pairs, always the same. `origin` is not used."""
    splits = {split: Pairs(_pairs(split, seed, count)) for split, (seed, count) in _SEEDS.items()}
    return Dataset(("no", "yes"), splits, text=True)


def _pairs(split: str, seed: int, count: int) -> list[Pair]:
    raw = np.random.PCG64(seed).random_raw(count * 2 * PAIRS)  # the stream, which no version of NumPy changes
    words = (raw >> 61).astype(np.int64).reshape(count, 2, PAIRS)
    follows = (words[:, 1] - words[:, 0]) % len(WORDS) < len(WORDS) // 2
    labels = (follows.sum(1) > PAIRS // 2).astype(int).tolist()
    texts = [[" ".join(WORDS[word] for word in sentence) for sentence in pair] for pair in words.tolist()]
    return [Pair(f"{split} {i}", label, *pair) for i, (label, pair) in enumerate(zip(labels, texts, strict=True))]
