"""Opens a prepared split and checks it against the manifest and the recipe."""

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from widemix.errors import InputError
from widemix.files import open_regular
from widemix.formats.beton import Beton
from widemix.formats.checksums import Checksums, open_checksums
from widemix.formats.manifest import check_counts, read_manifest, split_path
from widemix.formats.text import TextBeton
from widemix.recipe.data import AnyDataSection

PreparedFile = Beton | TextBeton  # n samples, their places and labels
Opened = TypeVar("Opened", bound=PreparedFile)


def open_split(section: AnyDataSection, split: str, open_file: Callable[[Path], Opened]) -> Opened:
    """A split's file, opened by `open_file` (`open_beton`, `open_text`) and checked; `InputError` if it is wrong."""
    folder = Path(section.path)
    manifest = read_manifest(folder)
    opened = open_file(split_path(folder, split, manifest))
    check_counts(opened.path, opened.label, manifest.splits[split])
    if len(manifest.classes) > section.num_classes:
        raise InputError(
            f"data.num_classes {section.num_classes}: {folder} has {len(manifest.classes)} classes, of which "
            f"labels go up to {len(manifest.classes) - 1}"
        )
    if section.targets != "class":
        if not opened.target_count:
            raise InputError(
                f"data.targets {section.targets}: {opened.path} holds classes; `widemix prep csv --targets` prepares "
                "numbers to predict"
            )
        if opened.target_count != section.num_classes:
            raise InputError(
                f"data.num_classes {section.num_classes}: {opened.path} has {opened.target_count} targets"
            )
        return opened
    if opened.target_count:
        names = ", ".join(manifest.classes[:3]) + ", ..." * (opened.target_count > 3)
        raise InputError(
            f"{opened.path}: holds the targets {names}, "
            "not classes; set data.targets to regression, or to multilabel if they are 0 and 1"
        )
    if not (opened.label.min() >= 0 and opened.label.max() < section.num_classes):
        raise InputError(
            f"{opened.path}: labels reach {opened.label.max()}, data.num_classes is {section.num_classes}"
        )
    return opened


def split_checksums(section: AnyDataSection, file: PreparedFile) -> Checksums | None:
    """The checksums of an open split's samples; None with `data.checksums` false."""
    return open_checksums(file) if section.checksums else None


def open_descriptor(file: PreparedFile, owner: object) -> int:
    """A descriptor of the file that was checked, closed with `owner`; `InputError` where its size has changed.

    Samples are read by it and not through the mapping, where a file that is truncated meanwhile would be a SIGBUS.
    """
    with open_regular(file.path) as opened:
        number = os.dup(opened.fileno())
    weakref.finalize(owner, os.close, number)
    if os.fstat(number).st_size != len(file.bytes):
        raise InputError(f"{file.path}: was changed while it was opened; prepare it again")
    return number
