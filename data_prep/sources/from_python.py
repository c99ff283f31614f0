"""Samples that a Python program gives: (image, label) pairs, where an image is a path or the bytes of a file.

A label is a number or name of a class; or several numbers to predict, the targets of the sample.

Bytes go to a temporary file next to the output: a generator is read once, while a preparation lists its samples
before it encodes them, in several processes. On Linux it has no name, and vanishes even with a killed process.
"""

import operator
import os
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from widemix.arguments import is_iterable
from widemix.data_prep.samples import Dataset, FileSlice, Sample
from widemix.data_prep.sources.labels import check_label, check_names, check_split, number_classes
from widemix.errors import InputError, shown
from widemix.formats.beton import TARGET
from widemix.formats.checksums import crc32c

SOURCE = "python"  # in the manifest
UNNAMED = sys.platform == "linux"  # elsewhere nothing like /proc opens a file without a name

Image = bytes | str | Path
Pairs = Iterable[tuple[Image, int | str | float | Sequence[float] | np.ndarray]]


@dataclass(frozen=True)
class _Images(Sequence[Sample]):
    spool: str  # path of the file that holds the images given as bytes
    names: list[str] = field(default_factory=list)  # the paths of the others
    labels: list[Any] = field(default_factory=list)
    offsets: array = field(default_factory=lambda: array("q"))  # bytes; -1 for a path
    sizes: array = field(default_factory=lambda: array("q"))  # bytes; -1 for a path
    targets: array = field(default_factory=lambda: array("f"))  # of all samples, one after the other

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index):
        place = FileSlice(self.names[index])
        if self.sizes[index] >= 0:
            place = FileSlice(self.spool, self.offsets[index], self.sizes[index])
        number = len(self.targets) // len(self)
        targets = self.targets[index * number : (index + 1) * number].tobytes()
        return Sample(self.names[index], self.labels[index], place, targets)


@contextmanager
def collect(
    splits: Mapping[str, Pairs], to: Path, targets: str = "", *, unnamed: bool = UNNAMED
) -> Iterator[Dataset]:
    """The samples of each split, in their order, to be prepared in the folder `to` before the context ends.

    Labels are integers from 0, or class names, numbered as by `number_classes`; or all are a float, or as many
    numbers as `targets` has names, separated by commas (default: 0, 1, ...). A sample's name is its path, or its
    split, number and CRC-32C. unnamed: whether the file of bytes has no name, which the system must be able to open.

    Raises `InputError` for a pair that is no (path or bytes, label), and for no pairs.
    """
    folder = next(parent for parent in to.absolute().parents if parent.is_dir())
    with (tempfile.TemporaryFile if unnamed else tempfile.NamedTemporaryFile)(dir=folder) as file:
        spool = f"/proc/{os.getpid()}/fd/{file.fileno()}" if unnamed else file.name
        collected = {split: _collect(split, pairs, splits, file, spool) for split, pairs in splits.items()}
        file.flush()
        counts = {len(images.targets) // len(images) for images in collected.values()}
        if counts - {0}:
            yield Dataset(_target_names(counts, targets), collected, targets=True)
            return
        if targets:
            raise InputError(f"targets {targets!r}: the labels are classes; give each sample one float or several")
        labels = {label for images in collected.values() for label in images.labels}
        kinds = {isinstance(label, str) for label in labels}
        if len(kinds) != 1:
            raise InputError("labels are both numbers and names" if kinds else "there are no splits")
        if kinds == {True}:
            classes, number = number_classes(SOURCE, _first_places(collected))
            for images in collected.values():
                images.labels[:] = [number[name] for name in images.labels]
        else:
            classes = tuple(map(str, range(1 + max(labels))))
        check_names(SOURCE, classes)
        yield Dataset(classes, collected)


def _first_places(collected: Mapping[str, _Images]) -> dict[str, str]:
    """The class names of all splits, each with the place that has it first."""
    first: dict[str, str] = {}
    for split, images in collected.items():
        for index, name in enumerate(images.labels):
            if name not in first:
                first[name] = f"{split}: pair {index}"
    return first


def _numbers(label: Any) -> int | np.ndarray:
    """A class, or targets: float32 [n]. TypeError or ValueError for anything else."""
    if isinstance(label, float | np.floating):
        return np.array([label], TARGET)
    if isinstance(label, Sequence | np.ndarray) and np.ndim(label) == 1:
        # NumPy makes floats of texts and dates, and drops the half of complex and masked numbers that no float has.
        if np.asarray(label).dtype.kind not in "biufO" or np.ma.is_masked(label):
            raise TypeError
        with np.errstate(over="ignore"):  # an infinity is refused
            return np.asarray(label, np.float64).astype(TARGET)
    return operator.index(label)


def _target_names(counts: set[int], given: str) -> tuple[str, ...]:
    """The names of the targets, of which each split's samples have one of `counts`."""
    if len(counts) > 1:
        raise InputError(f"the samples of one split have {min(counts)} targets, those of another {max(counts)}")
    number = max(counts)
    names = tuple(name.strip() for name in given.split(",")) if given else tuple(map(str, range(number)))
    if len(set(names)) != number or "" in names:
        raise InputError(f"targets {given!r}: the samples have {number}; name each once, separated by commas")
    return names


def _name(label: str) -> str:
    """The name of a class; `ValueError` for one that no file can hold."""
    if not label.strip() or "\0" in label:
        raise ValueError
    label.encode("utf-8", "surrogateescape")  # names of folders may be any bytes; halves of characters raise
    return label


def _collect(split: str, pairs: Pairs, splits: Iterable[str], file: IO[bytes], spool: str) -> _Images:
    check_split("", split, splits)
    if not is_iterable(pairs):
        raise InputError(f"{split}: {shown(pairs)} are no pairs (path or bytes, label)")
    images = _Images(spool)
    for index, pair in enumerate(pairs):
        try:
            image, label = pair
            if isinstance(image, bytes):
                name, data = f"{split}/{index}-{crc32c(image):08x}", image
            else:
                name, data = str(Path(image)), None
                if b"\0" in os.fsencode(name):
                    raise ValueError
        except Exception:  # of any class that was given
            wanted = "(path or bytes, number, name or several numbers)"
            raise InputError(f"{split}: pair {index} is {shown(pair)}, not {wanted}") from None
        try:
            label = _name(label) if isinstance(label, str) else _numbers(label)
        except Exception:
            given = f"{shown(label)} ({type(label).__name__})"
            raise InputError(f"{split}: pair {index} has the label {given}, no number, name or several") from None
        number = len(label) if isinstance(label, np.ndarray) else 0
        if index and number != len(images.targets) // index:
            raise InputError(f"{split}: pair {index} has {number} targets, and those before it have others")
        if isinstance(label, np.ndarray):
            if not number or not np.isfinite(label).all():
                raise InputError(f"{split}: pair {index} has the targets {label.tolist()}, not finite numbers")
            images.targets.frombytes(label.tobytes())
            label = -1
        elif isinstance(label, int):
            check_label(f"{split}: pair {index}", label)
        images.names.append(name)
        images.labels.append(label)
        images.offsets.append(-1 if data is None else file.tell())
        images.sizes.append(-1 if data is None else file.write(data))
    if not images.names:
        raise InputError(f"{split}: has no pairs")
    return images
