"""How a dataset's samples become records of a file: images in one way, sentence pairs in another."""

import os
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from widemix.cgroups import usable_cpus
from widemix.data_prep.encode import encode_all
from widemix.data_prep.layout import Layout, image_layout
from widemix.data_prep.restart import library
from widemix.data_prep.samples import Dataset
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.text import text_layout
from widemix.errors import InputError
from widemix.formats.beton import COEFFICIENT_FIELDS, FIELDS, SEGMENT_FIELDS
from widemix.formats.tables import Fields
from widemix.formats.text import TOKENIZER


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
    from widemix.data_prep.wordpiece import encode_pairs, learn_tokenizer, load_tokenizer

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
