"""MultiNLI (Williams et al. 2018) and SNLI (Bowman et al. 2015): sentence pairs as .jsonl, GLUE's .tsv or plain .tsv.

Columns are found by name: sentence1, sentence2, and gold_label or label. Files may be compressed (.gz).
"""

import io
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from widemix.data_prep.samples import IN_MEMORY, Dataset, FileSlice, Status
from widemix.data_prep.sources.labels import parse_json
from widemix.data_prep.sources.official import FileException, unpack
from widemix.errors import InputError

CLASSES = ("entailment", "neutral", "contradiction")
SUFFIX = r"\.(jsonl|tsv|txt)(\.gz)?"


class Pair(NamedTuple):
    """Two sentences that are not tokenised yet."""

    name: str
    label: int
    first: str
    second: str

    def content(self) -> bytes:
        """Both sentences."""
        return f"{self.first}\0{self.second}".encode("utf-8", "surrogatepass")

    def status(self) -> Status:
        """Pairs are read with their listing."""
        return IN_MEMORY


def mnli(origin: Path) -> Dataset:
    """Any of train, dev_matched and dev_mismatched, and parts of the latter two such as dev_matched_small."""
    return _read(origin, [r"(?:multinli_1\.0_)?(train|dev_(?:mis)?matched\w*)"], "train, dev_matched, dev_mismatched")


def snli(origin: Path) -> Dataset:
    """Any of train, dev and test; files whose name begins with snli take precedence."""
    return _read(origin, [r"snli_(?:1\.0_)?(train|dev|test)", "(train|dev|test)"], "snli_train, snli_dev, snli_test")


def _read(origin: Path, stems: Sequence[str], wanted: str) -> Dataset:
    if not origin.is_dir():
        raise InputError(f"{origin}: is not a folder of .jsonl or .tsv files")
    for stem in stems:
        matches = [(re.fullmatch(stem + SUFFIX, path.name.lower()), path) for path in sorted(origin.iterdir())]
        files = {match[1]: path for match, path in reversed(matches) if match}
        if files:
            splits = {split: _pairs(path) for split, path in sorted(files.items())}
            exceptions = tuple(exception for _, more in splits.values() for exception in more)
            return Dataset(CLASSES, {split: pairs for split, (pairs, _) in splits.items()}, exceptions, text=True)
    raise InputError(f"{origin}: holds none of {wanted} as .jsonl, .tsv or .txt (or .gz of them)")


def _pairs(path: Path) -> tuple[list[Pair], tuple[FileException, ...]]:
    """The labelled pairs of a file, and an exception with the number of those that have no gold label."""
    pairs, unlabelled = [], 0
    for number, row in _rows(path):
        try:
            gold = row["gold_label"] if "gold_label" in row else row["label"]
            first, second = row["sentence1"], row["sentence2"]
            first.encode(), second.encode()
        except (KeyError, TypeError):
            raise InputError(
                f"{path}: line {number} lacks one of the columns sentence1, sentence2, gold_label"
            ) from None
        except (AttributeError, UnicodeEncodeError):  # null, a number; half of a pair of surrogates
            raise InputError(f"{path}: line {number} has a sentence that is not text") from None
        if gold == "-":  # the annotators disagreed
            unlabelled += 1
        elif gold in CLASSES:
            pairs.append(Pair(f"{path.name}:{number}", CLASSES.index(gold), first, second))
        else:
            raise InputError(f"{path}: line {number} has the label {gold!r}, none of {', '.join(CLASSES)}")
    if not pairs:
        raise InputError(f"{path}: holds no labelled pairs")
    rule = f"left out {unlabelled} pairs without a gold label"
    return pairs, ({"file": path.name, "rule": rule},) if unlabelled else ()


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """The number of each line, from 1, and its values by column. Tabs separate values; quotes are ordinary text."""
    is_json, header = ".jsonl" in path.name.lower(), None
    for number, line in enumerate(_lines(path), start=1):
        if not line:
            continue
        if is_json:
            try:
                yield number, parse_json(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}: line {number} is not JSON ({error}); is the file cut short?") from None
            continue
        values = line.split("\t")
        if header is None:
            header = values
            if len(set(header)) < len(header):
                raise InputError(f"{path}: its first line names a column twice")
        elif len(values) == len(header) or _has_more_annotators(header, values):
            yield number, dict(zip(header, [*values[: len(header) - 1], values[-1]], strict=True))
        else:
            raise InputError(f"{path}: line {number} has {len(values)} columns, the first has {len(header)}")


def _has_more_annotators(header: Sequence[str], values: Sequence[str]) -> bool:
    """Whether a row has up to label5 before gold_label, where the first line has label1 alone: as in GLUE's SNLI."""
    labels = values[len(header) - 2 :]
    return list(header[-2:]) == ["label1", "gold_label"] and 2 < len(labels) <= 6 and {*labels} <= {*CLASSES, "", "-"}


def _lines(path: Path) -> Iterator[str]:
    data = FileSlice(str(path)).read()
    try:
        text = unpack(data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); download it again") from None
    for line in io.StringIO(text, newline="\n"):
        yield line.rstrip("\r\n")


FAR_PAIRS, FAR_WORDS = 7, "abcdefgh"
_SEEDS = {"train": (0, 20_000), "test": (1, 5_000)}  # and how many


def far_pairs(origin: None) -> Dataset:
    """20,000 training and 5,000 test pairs, always the same, whose class depends on words that are far apart.

    For Navon & Bronstein's question. Each sentence has seven of eight words that stand in a circle. Word i of the
    second follows word i of the first if it is up to three places after it; the class is whether more of the seven
    follow than do not. A word follows half of all words, so neither sentence says anything by itself, nor do any
    counts of words; the sum over the seven pairs of a table of both words says all of it. As a function of the two
    sentences that sum has a separation rank of at least four, that of the table. `origin` is not used.
    """
    splits = {split: _generated_pairs(split, seed, count) for split, (seed, count) in _SEEDS.items()}
    return Dataset(("no", "yes"), splits, text=True)


def _generated_pairs(split: str, seed: int, count: int) -> list[Pair]:
    raw = np.random.PCG64(seed).random_raw(count * 2 * FAR_PAIRS)  # the stream, which no version of NumPy changes
    words = (raw >> 61).astype(np.int64).reshape(count, 2, FAR_PAIRS)
    follows = (words[:, 1] - words[:, 0]) % len(FAR_WORDS) < len(FAR_WORDS) // 2
    labels = (follows.sum(1) > FAR_PAIRS // 2).astype(int).tolist()
    texts = [[" ".join(FAR_WORDS[word] for word in sentence) for sentence in pair] for pair in words.tolist()]
    return [Pair(f"{split} {i}", label, *pair) for i, (label, pair) in enumerate(zip(labels, texts, strict=True))]
