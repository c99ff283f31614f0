"""A table of pictures: a .csv with the columns `path`, `label` and, if there are several splits, `split`."""

import csv
import os
from collections import defaultdict
from pathlib import Path

from data_prep.samples import Dataset, PictureFiles
from pipeline.errors import InputError


def read(origin: Path) -> Dataset:
    """The pictures of a .csv, in its order. Paths are absolute, or relative to its folder.

    Labels are numbers from 0, or class names, which are numbered in sorted order. Without the column `split` all is
    train. Raises `InputError` with the line that is wrong.
    """
    rows: dict[str, list[tuple[str, str]]] = defaultdict(list)
    try:
        with origin.open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file, strict=True)
            missing = {"path", "label"} - set(table.fieldnames or ())
            if missing:
                raise InputError(
                    f"{origin}: has no column {min(missing)!r}; its first line names path, label and split"
                )
            for row in table:
                path, label, split = row["path"], row["label"], row.get("split", "train")
                if not (path and label and split) or None in row:
                    raise InputError(f"{origin}: line {table.line_num} has other columns than the first line")
                rows[split].append((path, label))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{origin}: cannot be read as a .csv ({error})") from None
    if not rows:
        raise InputError(f"{origin}: lists no pictures")
    bad = next((split for split in rows if not split.isidentifier()), None)
    if bad is not None:
        raise InputError(f"{origin}: split {bad!r} is no name such as train")
    classes = _classes({label for split in rows.values() for _, label in split})
    number = {name: index for index, name in enumerate(classes)}
    return Dataset(
        classes,
        {
            split: PictureFiles(
                origin.parent,
                [_relative(path, origin.parent) for path, _ in pairs],
                [number[label] for _, label in pairs],
            )
            for split, pairs in rows.items()
        },
    )


def _relative(path: str, folder: Path) -> str:
    return os.path.relpath(path, folder) if os.path.isabs(path) else path


def _classes(labels: set[str]) -> tuple[str, ...]:
    if all(label.isdecimal() and str(int(label)) == label for label in labels):
        return tuple(map(str, range(1 + max(map(int, labels)))))
    return tuple(sorted(labels))
