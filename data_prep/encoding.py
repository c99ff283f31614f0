"""How a dataset's samples become records of a file: pictures one way, sentence pairs another."""

from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.encode import encode_all
from data_prep.restart import library
from data_prep.samples import Dataset
from data_prep.settings import PrepSettings
from data_prep.text import text_layout
from data_prep.write import PICTURES, SEGMENTED_PICTURES, Layout
from pipeline.cgroups import usable_cpus
from pipeline.formats.text import TOKENIZER


class Encoding(NamedTuple):
    """The file's layout, and what makes its records."""

    layout: Layout
    records: Callable[..., Generator[Any]]  # (samples, start) -> records from number `start` on
    shared: bool  # whether processes share the work
    unit: str  # of the samples, in messages
    files: dict[str, bytes]  # that belong beside the data: name -> content
    versions: dict[str, str]  # of what else the bytes depend on


def encoding_for(dataset: Dataset, origin: Path | None, settings: PrepSettings, processes: int | None) -> Encoding:
    """The encoding of this kind of samples, by `processes`, or as many as there are usable CPUs."""
    if dataset.text:
        return _of_pairs(dataset, origin, settings)
    in_memory = all(isinstance(split[0].picture, np.ndarray) for split in dataset.splits.values())
    workers = 1 if in_memory else processes or usable_cpus()
    records = partial(encode_all, settings=settings, processes=workers)
    if in_memory or settings.raw:
        return Encoding(PICTURES, records, not in_memory, "images", {}, {})
    compiled = library()  # built here, before any process that encodes wants it
    versions = {"jpeg": compiled.jpeg_library().decode() if compiled else "none"}
    layout = SEGMENTED_PICTURES if settings.restart_markers else PICTURES
    return Encoding(layout, records, True, "images", {}, versions)


def _of_pairs(dataset: Dataset, origin: Path | None, settings: PrepSettings) -> Encoding:
    from data_prep.wordpiece import encode_pairs, learn_tokenizer, load_tokenizer

    beside = [] if origin is None else [origin / "vocab.txt"]
    given = [Path(settings.vocab)] if settings.vocab else [path for path in beside if path.exists()]
    if given:
        tokenizer = load_tokenizer(given[0], settings.length)
    else:
        learnt_from = dataset.splits.get("train") or next(iter(dataset.splits.values()))
        tokenizer = learn_tokenizer(learnt_from, settings.vocab_size, settings.length)
    records = partial(encode_pairs, tokenizer=tokenizer, length=settings.length)
    files = {TOKENIZER: tokenizer.to_str().encode()}
    return Encoding(text_layout(settings.length), records, False, "pairs", files, {})
