"""How samples become records of a file: images in several processes, sentence pairs as WordPiece tokens."""

import os
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from widemix.cgroups import usable_cpus
from widemix.data_prep.image_processes import encode_all
from widemix.data_prep.jpeg import library
from widemix.data_prep.records import EncodedPair, Layout, image_layout, text_layout
from widemix.data_prep.samples import Dataset, Origin
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources.pairs import Pair
from widemix.errors import InputError
from widemix.formats.beton import COEFFICIENT_FIELDS, FIELDS, SEGMENT_FIELDS
from widemix.formats.checksums import crc32c
from widemix.formats.tables import Fields
from widemix.formats.text import TOKEN, TOKENIZER

BATCH = 1000  # pairs per call of the tokenizer, which uses all threads
ALPHABET = 1000  # most frequent characters that are kept
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class Encoding(NamedTuple):
    """A file's layout, and the function that makes its records."""

    layout: Layout
    records: Callable[..., Generator[Any]]  # (samples, start) -> records from number `start` on
    parallel: bool  # whether several processes share the work
    unit: str  # plural name of the samples in messages
    files: dict[str, bytes]  # name -> content of what is stored next to the data
    versions: dict[str, str]  # name -> version of what else the bytes depend on


def encoding_for(dataset: Dataset, origin: Path | None, settings: PrepSettings, processes: int | None) -> Encoding:
    """The encoding for this kind of samples, with `processes` processes (None: one per usable CPU)."""
    if dataset.text:
        return _encoding_of_pairs(dataset, origin, settings)
    in_memory = all(isinstance(split[0].image, np.ndarray) for split in dataset.splits.values())
    workers = 1 if in_memory else processes or usable_cpus()
    records = partial(encode_all, settings=settings, processes=workers)
    targets = len(dataset.classes) if dataset.targets else 0
    compiled = None if in_memory else library()  # built here, before the processes that encode need it
    if in_memory or settings.raw:
        layout = image_layout(FIELDS, targets)
        return Encoding(layout, records, not in_memory, "images", {}, {})
    versions = {"jpeg": compiled.jpeg_library().decode() if compiled else "none"}
    fields: Fields = SEGMENT_FIELDS if settings.segments else FIELDS
    if settings.encoding == "coefficients":
        fields = COEFFICIENT_FIELDS
        if compiled is None:
            raise InputError("encoding coefficients: needs the compiled code; leave it out to store JPEGs")
    layout = image_layout(fields, targets)
    return Encoding(layout, records, True, "images", {}, versions)


def _encoding_of_pairs(dataset: Dataset, origin: Path | None, settings: PrepSettings) -> Encoding:
    default = [] if origin is None else [origin / "vocab.txt"]
    given = [Path(settings.vocab)] if settings.vocab else [path for path in default if os.path.lexists(path)]
    if given:
        tokenizer = load_tokenizer(given[0], settings.length)
    else:
        train = dataset.splits.get("train") or next(iter(dataset.splits.values()))
        tokenizer = learn_tokenizer(train, settings.vocab_size, settings.length)
    records = partial(encode_pairs, tokenizer=tokenizer, length=settings.length)
    files = {TOKENIZER: tokenizer.to_str().encode()}
    return Encoding(text_layout(settings.length), records, False, "pairs", files, {})


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
