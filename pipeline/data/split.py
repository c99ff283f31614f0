"""A prepared split, refused unless it is what the manifest and the recipe say."""

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from pipeline.errors import InputError
from pipeline.formats.manifest import check_counts, read_manifest, split_path
from pipeline.recipe.data import PreparedSection


class PreparedFile(Protocol):
    """What an opened file of pictures and one of text have in common: n samples and where they lie, bytes."""

    @property
    def path(self) -> Path: ...

    @property
    def bytes(self) -> np.ndarray: ...

    @property
    def offset(self) -> np.ndarray: ...

    @property
    def size(self) -> np.ndarray: ...

    @property
    def label(self) -> np.ndarray: ...

    def __len__(self) -> int: ...


Opened = TypeVar("Opened", bound=PreparedFile)


def open_split(section: PreparedSection, split: str, open_file: Callable[[Path], Opened]) -> Opened:
    """A split's file as `open_file` (`open_beton`, `open_text`) reads it, or `InputError`."""
    folder = Path(section.path)
    manifest = read_manifest(folder)
    opened = open_file(split_path(folder, split, manifest))
    check_counts(opened.path, opened.label, manifest.splits[split])
    if len(manifest.classes) > section.num_classes:
        raise InputError(
            f"data.num_classes {section.num_classes}: {folder} has {len(manifest.classes)} classes, of which "
            f"labels go up to {len(manifest.classes) - 1}"
        )
    if not (opened.label.min() >= 0 and opened.label.max() < section.num_classes):
        raise InputError(
            f"{opened.path}: labels reach {opened.label.max()}, data.num_classes is {section.num_classes}"
        )
    return opened


def descriptor(file: PreparedFile, owner: object) -> int:
    """The very file that was checked, open to be read until `owner` is gone; `InputError` where it has changed.

    By reading and not through its mapping: a file that is cut short meanwhile then gives an error, not a signal.
    """
    number = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    weakref.finalize(owner, os.close, number)
    if os.fstat(number).st_size != len(file.bytes):
        raise InputError(f"{file.path}: was changed while it was opened; prepare it again")
    return number
