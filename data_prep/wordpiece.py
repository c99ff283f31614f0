"""Sentence pairs -> token arrays, by a WordPiece vocabulary that is given or learnt from the training pairs."""

from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.pairs import Pair
from data_prep.text import EncodedPair
from pipeline.errors import InputError
from pipeline.formats.text import TOKEN

BATCH = 1000  # pairs tokenised at a time, by all threads
ALPHABET = 1000  # characters, the most frequent ones
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def load_tokenizer(vocabulary: Path, length: int) -> Any:
    """BERT's lower-case WordPiece over the words of a vocab.txt, one a line. Pairs are cut to `length` tokens."""
    if vocabulary.exists() and not vocabulary.is_file():
        raise InputError(f"{vocabulary}: is no file")
    try:
        return _cut(_wordpiece()(str(vocabulary), lowercase=True), length)
    except Exception as error:  # the library raises plain Exception for a missing or damaged file
        if isinstance(error, InputError):
            raise
        raise InputError(f"{vocabulary}: is no WordPiece vocabulary, a word a line ({error})") from None


def learn_tokenizer(pairs: Sequence[Pair], words: int, length: int) -> Any:
    """The same over a vocabulary of at most `words`, learnt from the sentences of the pairs, the same every time.

    The library numbers its first pieces in the order of a hash table, and ties follow the numbers. Naming them all
    beforehand, as special words, fixes both; a fresh tokenizer over the result knows them as plain words.
    """
    wordpiece = _wordpiece()
    learner = wordpiece(lowercase=True)
    sentences = [sentence for pair in pairs for sentence in (pair.first, pair.second)]
    counts = Counter(
        character for sentence in sentences for character in "".join(learner.normalize(sentence).split())
    )
    alphabet = sorted(sorted(counts), key=counts.__getitem__, reverse=True)[:ALPHABET]
    first = [*SPECIAL, *alphabet, *(f"##{character}" for character in alphabet)]
    learner.train_from_iterator(
        sentences, vocab_size=words, special_tokens=first, limit_alphabet=ALPHABET, show_progress=False
    )
    return _cut(wordpiece(learner.get_vocab(), lowercase=True), length)


def encode_pairs(samples: Sequence[Pair], start: int, tokenizer: Any, length: int) -> Generator[EncodedPair]:
    """The pairs from number `start` on, in order: [CLS] first [SEP] second [SEP], padded to `length`."""
    padding = tokenizer.token_to_id("[PAD]")
    for first in range(start, len(samples), BATCH):
        pairs = [samples[i] for i in range(first, min(first + BATCH, len(samples)))]
        encodings = tokenizer.encode_batch([(pair.first, pair.second) for pair in pairs])
        for pair, encoding in zip(pairs, encodings, strict=True):
            tokens = np.full(length, padding, TOKEN)
            tokens[: len(encoding.ids)] = encoding.ids
            second = encoding.type_ids.index(1)  # its [SEP] at least
            yield EncodedPair(pair.name, tokens.tobytes(), "", len(encoding.ids), second, pair.label)


def _wordpiece() -> Any:
    try:
        from tokenizers import BertWordPieceTokenizer
    except ImportError:
        raise InputError("text needs the package tokenizers; pip install tokenizers") from None
    return BertWordPieceTokenizer


def _cut(tokenizer: Any, length: int) -> Any:
    missing = [word for word in SPECIAL[:4] if tokenizer.token_to_id(word) is None]
    if missing:
        raise InputError(f"the vocabulary lacks {', '.join(missing)}")
    tokenizer.enable_truncation(length, strategy="longest_first")
    return tokenizer
