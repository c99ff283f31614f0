"""Sentence pairs -> token arrays, by a WordPiece vocabulary that is given, or learnt from the training pairs."""

import os
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from widemix.data_prep.pairs import Pair
from widemix.data_prep.samples import Origin
from widemix.data_prep.text import EncodedPair
from widemix.errors import InputError
from widemix.formats.checksums import crc32c
from widemix.formats.text import TOKEN

BATCH = 1000  # pairs per call of the tokenizer, which uses all threads
ALPHABET = 1000  # most frequent characters that are kept
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def load_tokenizer(vocabulary: Path, length: int) -> Any:
    """BERT's lower-case WordPiece tokenizer over a vocab.txt, one word per line; truncates pairs to `length` tokens.

    Raises `InputError` if the vocabulary cannot be read, or the package tokenizers is missing.
    """
    if os.path.lexists(vocabulary) and not vocabulary.is_file():
        raise InputError(f"{vocabulary}: is not a regular file")
    try:
        return _truncating(_wordpiece()(str(vocabulary), lowercase=True), length)
    except Exception as error:  # tokenizers raises Exception itself for a missing or damaged file
        if isinstance(error, InputError):
            raise
        raise InputError(f"{vocabulary}: is not a WordPiece vocabulary with one word per line ({error})") from None


def learn_tokenizer(pairs: Sequence[Pair], words: int, length: int) -> Any:
    """The same over a vocabulary of at most `words` words learnt from the pairs, which is deterministic.

    The library numbers the characters in the order of a hash table, and breaks ties by those numbers. Passing all
    of them as special tokens fixes their order; the tokenizer that is returned treats them as ordinary words.
    """
    wordpiece = _wordpiece()
    learner = wordpiece(lowercase=True)
    sentences = [sentence for pair in pairs for sentence in (pair.first, pair.second)]
    counts = Counter(
        character
        for sentence in sentences
        for character in "".join(learner.normalizer.normalize_str(sentence).split())
    )
    alphabet = sorted(sorted(counts), key=counts.__getitem__, reverse=True)[:ALPHABET]
    first = [*SPECIAL, *alphabet, *(f"##{character}" for character in alphabet)]
    learner.train_from_iterator(
        sentences, vocab_size=words, special_tokens=first, limit_alphabet=ALPHABET, show_progress=False
    )
    return _truncating(wordpiece(learner.get_vocab(), lowercase=True), length)


def encode_pairs(samples: Sequence[Pair], start: int, tokenizer: Any, length: int) -> Generator[EncodedPair]:
    """Encode the pairs from number `start` on, in order, padded to `length` tokens."""
    padding = tokenizer.token_to_id("[PAD]")
    for first in range(start, len(samples), BATCH):
        pairs = [samples[i] for i in range(first, min(first + BATCH, len(samples)))]
        encodings = tokenizer.encode_batch([(pair.first, pair.second) for pair in pairs])
        for pair, encoding in zip(pairs, encodings, strict=True):
            tokens = np.full(length, padding, TOKEN)
            tokens[: len(encoding.ids)] = encoding.ids
            second = encoding.type_ids.index(1)  # at least its [SEP]
            origin = Origin(crc32c(pair.content()))
            yield EncodedPair(pair.name, tokens.tobytes(), "", len(encoding.ids), second, pair.label, origin)


def _wordpiece() -> Any:
    try:
        from tokenizers import BertWordPieceTokenizer
    except ImportError:
        raise InputError("sentence pairs need the package tokenizers; run `pip install tokenizers`") from None
    return BertWordPieceTokenizer


def _truncating(tokenizer: Any, length: int) -> Any:
    missing = [word for word in SPECIAL[:4] if tokenizer.token_to_id(word) is None]
    if missing:
        raise InputError(f"the vocabulary lacks {', '.join(missing)}")
    tokenizer.enable_truncation(length, strategy="longest_first")
    return tokenizer
