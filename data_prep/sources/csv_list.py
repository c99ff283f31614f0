"""A table of images: a .csv, or a .jsonl with an object a line, whose columns are `path`, what is to be predicted
and, if there are several splits, `split`.

To predict is one of these: a class in the column `label`; any number of classes in the column `labels`, separated by
`|` (in a .jsonl a list); or the numbers in columns that are named when it is read.
"""

import csv
import io
import math
import os
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from widemix.data_prep.samples import Dataset, ImageFiles
from widemix.data_prep.sources.labels import NUMBER, ascii_digits, check_split, number_classes, parse_json
from widemix.data_prep.subset import Subset
from widemix.errors import InputError
from widemix.files import open_regular
from widemix.formats.beton import TARGET
from widemix.progress_line import print_status

SEPARATOR = "|"  # of the class names in the column `labels`
PLACES = ("path", "split")  # columns that are no targets
LABELS = ("label", "labels")


def read(origin: Path, targets: str = "") -> Dataset:
    """The images of a table, in its order, or of the only one in a folder. Paths are absolute, or relative to that.

    targets: columns with a number for each image, separated by commas; `*` for all but `path` and `split`.

    Labels are whole numbers from 0, or class names, which are numbered in sorted order (`number_classes`). Without
    the column `split` all is train. Raises `InputError` with the line that is wrong.
    """
    origin = find_table(origin)
    table = _read(origin)
    if not table.rows:
        raise InputError(f"{origin}: lists no images")
    splits: dict[str, list[int]] = defaultdict(list)  # the numbers of rows
    for number, (line, split) in enumerate(table.column("split", "train")):
        if not isinstance(split, str) or split not in splits:
            check_split(f"{origin}: line {line}: ", split, splits)
        splits[split].append(number)
    paths = []
    for line, path in table.column("path"):
        if not _is_text(path):
            raise InputError(f"{origin}: line {line}: path {path!r:.80} is not that of an image")
        paths.append(_relative(path, origin.parent))
    names, labels, values = _targets(origin, table, targets) if targets else _labels(origin, table)

    def images(chosen: list[int]) -> ImageFiles:
        of_split = None if values is None else Subset(values, chosen)
        return ImageFiles(origin.parent, [paths[i] for i in chosen], [labels[i] for i in chosen], of_split)

    return Dataset(names, {split: images(chosen) for split, chosen in splits.items()}, targets=values is not None)


def find_table(origin: Path) -> Path:
    """The table itself, or the only one in a folder. Raises `InputError` if there is none, or are several."""
    if not origin.is_dir():
        return origin
    found = sorted(path for path in origin.iterdir() if path.suffix.lower() in (".csv", ".jsonl"))
    if len(found) != 1:
        held = f"holds {found[0].name} and {len(found) - 1} more" if found else "holds no .csv or .jsonl"
        raise InputError(f"{origin}: is a folder that {held}; name the table itself")
    return found[0]


def relative_paths(table: Path) -> list[str]:
    """The paths in a table that are relative to its folder, each once."""
    paths = (path for _, path in _read(table).column("path") if _is_text(path) and not os.path.isabs(path))
    return list(dict.fromkeys(map(os.path.normpath, paths)))


class _Table(NamedTuple):
    columns: list[str]
    lines: array  # of each row in the file
    rows: list[list[Any]]  # values in the order of `columns`

    def column(self, name: str, default: Any = None) -> Iterator[tuple[int, Any]]:
        """The line and the value of each row; without such a column the default."""
        if name not in self.columns:
            return ((line, default) for line in self.lines)
        place = self.columns.index(name)
        return ((line, row[place]) for line, row in zip(self.lines, self.rows, strict=True))


def _read(origin: Path) -> _Table:
    kind = ".jsonl" if origin.suffix.lower() == ".jsonl" else ".csv"
    try:
        with io.TextIOWrapper(open_regular(origin), encoding="utf-8-sig", newline="") as file:
            return _read_jsonl(origin, file) if kind == ".jsonl" else _read_csv(origin, file)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{origin}: cannot be read as a {kind} ({error})") from None


def _read_csv(origin: Path, file: Iterable[str]) -> _Table:
    reader = csv.reader(file, strict=True)
    columns = [name.strip() for name in next(reader, [])]
    if len(columns) == 1 and (other := next((mark for mark in ";\t|" if mark in columns[0]), "")):
        raise InputError(f"{origin}: its columns are separated by {other!r}; separate them by commas")
    if "path" not in columns:
        raise InputError(f"{origin}: has no column 'path'; its first line names path, label and split")
    if len(set(columns)) < len(columns):
        raise InputError(f"{origin}: its first line names a column twice")
    table = _Table(columns, array("q"), [])
    for row in filter(None, reader):  # an empty line is none
        if len(row) != len(columns):
            raise InputError(
                f"{origin}: line {reader.line_num} has {len(row)} columns, and the first line has {len(columns)}"
            )
        table.lines.append(reader.line_num)
        table.rows.append(row)
    return table


def _read_jsonl(origin: Path, file: Iterable[str]) -> _Table:
    table = _Table([], array("q"), [])
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            row = parse_json(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{origin}: line {line} is not JSON ({error})") from None
        if not isinstance(row, dict) or "path" not in row:
            raise InputError(f"{origin}: line {line} is no object with a key 'path'")
        if not table.rows:
            table.columns.extend(row)
        if row.keys() != set(table.columns):
            raise InputError(f"{origin}: line {line} has other keys than line {table.lines[0]}")
        table.lines.append(line)
        table.rows.append([row[name] for name in table.columns])
    return table


def _targets(origin: Path, table: _Table, targets: str) -> tuple[tuple[str, ...], list[int], Sequence[np.ndarray]]:
    """Names of the targets, a label -1 for each row, and float32 [rows, targets]."""
    there = [column for column in table.columns if column not in PLACES]
    named = there if targets == "*" else [name.strip() for name in targets.split(",")]
    for name in named:
        if name not in there:
            held = ", ".join(there) or "no such columns"
            raise InputError(f"{origin}: has no column {name!r} of targets; it has {held}")
    if len(set(named)) < len(named) or not named:
        raise InputError(f"targets {targets!r}: name each column of numbers once")
    values = np.empty((len(table.rows), len(named)), TARGET)
    for place, name in enumerate(named):
        for number, (line, given) in enumerate(table.column(name)):
            values[number, place] = _number(f"{origin}: line {line}: {name}", given)
    return tuple(named), [-1] * len(table.rows), cast(Sequence[np.ndarray], values)


def _number(where: str, given: Any) -> float:
    """A finite number of 32 bits."""
    try:
        text = ascii_digits(given.strip()) if isinstance(given, str) else None
        is_number = NUMBER.fullmatch(text) if text is not None else type(given) in (int, float)
        value = float(text or given) if is_number else math.nan
    except (ValueError, OverflowError):
        value = math.nan
    if not abs(value) <= float(np.finfo(TARGET).max):
        raise InputError(f"{where} is {given!r:.40}, not a finite number")
    return value


def _labels(origin: Path, table: _Table) -> tuple[tuple[str, ...], list[int], Sequence[np.ndarray] | None]:
    """Class names, labels and, if a row may have several, those of each row."""
    here = [name for name in LABELS if name in table.columns]
    if not here:
        others = ", ".join(column for column in table.columns if column not in PLACES)
        cure = f"; name columns of numbers with --targets: {others}" if others else ""
        raise InputError(f"{origin}: has no column 'label' or 'labels'{cure}")
    if len(here) > 1:
        raise InputError(f"{origin}: has both the column label, for one class, and labels, for any number; keep one")
    if here == ["labels"]:
        return _several(origin, table)
    labels = [_class_name(origin, line, label) for line, label in table.column("label")]
    names, number = number_classes(origin, _first_places(origin, table, ([label] for label in labels)))
    return names, [number[label] for label in labels], None


@dataclass(frozen=True)
class _Indicators(Sequence[np.ndarray]):
    """A 1 for each class of a row and a 0 for each other one, float32 [classes]: made on access."""

    rows: Sequence[array]  # the classes of each
    classes: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):
        values = np.zeros(self.classes, TARGET)
        values[self.rows[index]] = 1
        return values


def _several(origin: Path, table: _Table) -> tuple[tuple[str, ...], list[int], _Indicators]:
    listed = [_listed(origin, line, given) for line, given in table.column("labels")]
    first = _first_places(origin, table, listed)
    if not first:
        raise InputError(f"{origin}: not one image has a class in the column labels")
    if all(len(row) < 2 for row in listed) and (name := next((name for name in first if set(name) & set(",;")), "")):
        print_status(
            f"warning: {origin}: no image has several classes, and one is named {name!r}; in the column labels "
            f"{SEPARATOR!r} separates them"
        )
    names, number = number_classes(origin, first, gaps=True)
    rows = [array("i", (number[name] for name in row)) for row in listed]
    return names, [-1] * len(listed), _Indicators(rows, len(names))


def _first_places(origin: Path, table: _Table, rows: Iterable[Sequence[str]]) -> dict[str, str]:
    """The classes of all rows, each with the place that has it first."""
    first: dict[str, str] = {}
    for line, row in zip(table.lines, rows, strict=True):
        for name in row:
            if name not in first:
                first[name] = f"{origin}: line {line}"
    return first


def _listed(origin: Path, line: int, given: Any) -> list[str]:
    """The class names of a row; none where the column is empty."""
    words = [] if given is None else given
    if isinstance(words, str):
        words = words.split(SEPARATOR) if words.strip() else []
    if not isinstance(words, list):
        raise InputError(f"{origin}: line {line}: labels {given!r:.40} is no list of class names")
    return [_class_name(origin, line, word) for word in words]


def _class_name(origin: Path, line: int, given: Any) -> str:
    """A class name, or the text of a number, without blanks around."""
    name = str(given) if isinstance(given, int | float) and not isinstance(given, bool) else given
    if not _is_text(name) or not name.strip():
        raise InputError(f"{origin}: line {line}: {given!r:.40} is no class name")
    return name.strip()


def _is_text(given: Any) -> bool:
    """Whether it is text that a file can hold: JSON may hold halves of characters."""
    if not isinstance(given, str) or not given or "\0" in given:
        return False
    return given == given.encode(errors="replace").decode()


def _relative(path: str, folder: Path) -> str:
    """The path from the folder; of one that is not below it by real folders, since after a link .. is another."""
    if not os.path.isabs(path):
        return path
    if ".." not in Path(path).parts and Path(path).is_relative_to(folder.absolute()):
        return os.path.relpath(path, folder)
    place, name = os.path.split(path)
    return os.path.relpath(os.path.join(os.path.realpath(place), name), os.path.realpath(folder))
