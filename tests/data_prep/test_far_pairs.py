"""The generated pairs: always the same ones, of classes that only both sentences together tell."""

import hashlib
from itertools import product

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from widemix.data_prep.sources.pairs import FAR_PAIRS, FAR_WORDS, Pair, far_pairs

CIRCLE = "abcdefghabc"


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Pair]]:
    return {name: list(pairs) for name, pairs in far_pairs(None).splits.items()}


def one_hot(sentence: str) -> np.ndarray:
    """[words of the sentence, words there are]."""
    return np.array([[word == other for other in FAR_WORDS] for word in sentence.split()], float)


def test_the_class_is_whether_most_words_follow(splits):
    for pair in splits["test"]:
        words = zip(pair.first.split(), pair.second.split(), strict=True)
        count = sum(two in CIRCLE[CIRCLE.index(one) : CIRCLE.index(one) + 4] for one, two in words)
        assert pair.label == (count > FAR_PAIRS - count)


def test_they_are_always_the_same(splits):
    assert {name: len(pairs) for name, pairs in splits.items()} == {"train": 20_000, "test": 5_000}
    content = b"".join(pair.content() + bytes([pair.label]) for pairs in splits.values() for pair in pairs)
    assert hashlib.sha256(content).hexdigest() == "ab84419d5c99a5a63702e040f7763a478bf88f34b72da000f39f82064cabfd93"
    assert not {pair.content() for pair in splits["train"]} & {pair.content() for pair in splits["test"]}


def test_a_word_says_nothing_and_the_table_of_both_all(splits):
    """Logistic regression on all words by their place is at chance; on the products of partners it is not."""
    pairs = splits["train"][:6000]
    labels = np.array([pair.label for pair in pairs])
    assert abs(labels.mean() - 0.5) < 0.02
    first = np.stack([one_hot(pair.first) for pair in pairs])
    second = np.stack([one_hot(pair.second) for pair in pairs])
    alone = np.concatenate([first, second], 1).reshape(len(pairs), -1)
    together = np.einsum("npa,npb->nab", first, second).reshape(len(pairs), -1)
    for features, low, high in ((alone, 0.45, 0.55), (together, 0.99, 1.0)):
        fitted = LogisticRegression(C=100, max_iter=500).fit(features[:4000], labels[:4000])
        assert low <= fitted.score(features[4000:], labels[4000:]) <= high


def test_the_table_has_rank_four():
    table = np.array(
        [two in CIRCLE[CIRCLE.index(one) : CIRCLE.index(one) + 4] for one, two in product(FAR_WORDS, FAR_WORDS)]
    )
    assert np.linalg.matrix_rank(np.where(table, 1.0, -1.0).reshape(8, 8)) == 4
