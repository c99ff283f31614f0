"""Hugging Face's image datasets, such as imagenet-1k: `data/train-00000-of-00294-*.parquet`.

A row has a column of the type {bytes, path} with the image's file, and a column with its label. Class names are in
the metadata of the schema.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from widemix.data_prep.samples import Dataset, FileSlice, Sample, Status
from widemix.data_prep.sources.labels import MAX_CLASSES, check_label, check_names
from widemix.data_prep.sources.shards import find_shards
from widemix.errors import InputError, install_extra
from widemix.files import open_regular, parse_json

BATCH = 16  # rows that are read at once
MOST_ROWS = 20_000_000  # of a file, whose labels are held in memory
MOST = 512 << 20  # bytes of an image
BUFFER = 1 << 20  # bytes read from a file at once
_READERS = threading.local()  # of each thread: the row group that it has read from last


class ParquetImage(NamedTuple):
    """The image in one row of a parquet file."""

    path: str
    column: str
    group: int  # row group of the file
    row: int  # of that group

    def status(self) -> Status:
        """The status of the file. Raises `InputError` if it cannot be read."""
        return FileSlice(self.path).status()

    def read(self) -> bytes:
        """The bytes of the image. Raises `InputError` if the file is damaged, or the row has no bytes."""
        return self.read_with_status()[0]

    def read_with_status(self) -> tuple[bytes, Status]:
        """The bytes, and the status of the file before they were read. Raises `InputError` as `read` does."""
        status = self.status()
        group = self.path, self.column, self.group, status
        reader = getattr(_READERS, "last", None)
        if reader is None or reader.of != group or self.row < reader.start:
            _READERS.last = reader = _Reader(group)
        return reader.read(self.row), status


class _Reader:
    """Reads a row group forwards, some rows at a time: a file may be one row group of several GB."""

    def __init__(self, of: tuple[str, str, int, Status]) -> None:
        self.of = of
        path, column, group, _ = of
        with _reading(path) as pyarrow:
            columns = [f"{column}.bytes"]
            file = _open(pyarrow, path)
            is_small = file.metadata.row_group(group).total_byte_size < 2 * MOST
            rows = BATCH if is_small else 1  # of which each may be large
            self.batches = file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)
        self.start = 0  # of the batch in the row group
        self.batch: Any = ()

    def read(self, row: int) -> bytes:
        path, column, group, _ = self.of
        while row >= self.start + len(self.batch):
            self.start += len(self.batch)
            with _reading(path):
                batch = next(self.batches, None)
            if batch is None:
                raise InputError(f"{path}: has fewer rows than when it was listed; run the same command again")
            self.batch = batch.column(0).field("bytes")
        value, place = self.batch[row - self.start], f"{path}: row {row} of row group {group}"
        if not value.is_valid:
            raise InputError(f"{place} has no {column}.bytes")
        if value.as_buffer().size > MOST:
            raise InputError(f"{place} has an image of more than {MOST:,} bytes; remove it")
        return value.as_py()


@dataclass(frozen=True)
class ParquetImages(Sequence[Sample]):
    """The images of several files. `Sample`s are made on access, which keeps millions of them small."""

    paths: Sequence[Path]
    names: Sequence[str]  # of the files, in messages
    columns: Sequence[str]  # of the images in each file
    labels: np.ndarray  # int64 [n]
    groups: np.ndarray  # int64 [row groups, 3]: file, number in the file, and first row in the file
    first: np.ndarray  # int64 [row groups], the first sample of each

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index):
        place = int(np.searchsorted(self.first, index, "right")) - 1
        file, group, before = self.groups[place].tolist()
        row = index - int(self.first[place])
        image = ParquetImage(str(self.paths[file]), self.columns[file], group, row)
        return Sample(f"{self.names[file]}/{before + row}", int(self.labels[index]), image)


class _File(NamedTuple):
    """A file as it was listed."""

    image: str  # name of the column
    classes: tuple[str, ...]  # empty if the file names none
    labels: np.ndarray  # int64 [rows]
    rows: list[int]  # of each row group


def read(origin: Path) -> Dataset:
    """The splits whose files `*.parquet` are in `origin`, in the order of the files' names and of their rows.

    A file's split follows from its path, as in `split_of`. Labels are -1 where there are none, as in the test
    split of imagenet-1k. Raises `InputError` for files that are damaged, or lack a column of images or labels.
    """
    listed = {
        split: {path: _list(path) for path in paths} for split, paths in find_shards(origin, ".parquet").items()
    }
    files = [(path, file) for split in listed.values() for path, file in split.items()]
    named = [(path, file.classes) for path, file in files if file.classes]
    highest = max(int(file.labels.max(initial=-1)) for _, file in files)
    classes = named[0][1] if named else tuple(map(str, range(1 + highest)))
    for path, names in named:
        if names != classes:
            raise InputError(f"{path}: names other classes than {named[0][0]}")
    for path, file in files:
        if file.labels.max(initial=-1) >= len(classes):
            raise InputError(f"{path}: has labels outside of its {len(classes)} classes")
    for split, of_split in listed.items():
        if not any(len(file.labels) for file in of_split.values()):
            raise InputError(f"{next(iter(of_split))}: {split} has no rows")
    return Dataset(classes, {split: _images(origin, of_split) for split, of_split in listed.items()})


@contextmanager
def _reading(path: Path | str) -> Iterator[Any]:
    """Yields pyarrow; `InputError` if it is not installed, or if what it reads from the file is damaged."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise InputError(f"parquet files are read with pyarrow: {install_extra('parquet')}") from None
    try:
        yield pyarrow
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{path}: cannot be read as parquet ({reason}); download it again") from None


def _open(pyarrow: Any, path: Path | str) -> Any:
    open_regular(path).close()
    return pyarrow.parquet.ParquetFile(path, buffer_size=BUFFER, pre_buffer=False, page_checksum_verification=True)


def _list(path: Path) -> _File:
    with _reading(path) as pyarrow:
        file = _open(pyarrow, path)
        schema, is_struct = file.schema_arrow, pyarrow.types.is_struct
        structs = [field for field in schema if is_struct(field.type) and _has_bytes(field.type)]
        integers = [field for field in schema if pyarrow.types.is_integer(field.type)]
        integers += [field for field in schema if field.name == "label" and _holds_numbers(pyarrow, field.type)]
        image, label = _column(path, "image", structs, schema), _column(path, "label", integers, schema)
        count = file.metadata.num_rows
        if count > MOST_ROWS:
            raise InputError(f"{path}: has {count:,} rows; a file has at most {MOST_ROWS:,}")
        labels = file.read([label], use_threads=False).column(0)
        rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    if labels.null_count:
        row = labels.is_null().to_numpy().argmax()
        raise InputError(f"{path}: row {row} has no {label}; remove such rows, or give all the label -1")
    names = _class_names(schema.metadata or {}, label)
    check_names(path, names)
    return _File(image, names, _whole_labels(path, labels.to_numpy()), rows)


def _has_bytes(struct: Any) -> bool:
    """Whether a type has a field `bytes` of one of the types binary, large_binary, fixed_size_binary, binary_view."""
    place = struct.get_field_index("bytes")
    return place >= 0 and "binary" in str(struct.field(place).type)


def _holds_numbers(pyarrow: Any, kind: Any) -> bool:
    """Whether it is the type of a column of labels that pandas wrote with others than whole numbers in it."""
    return pyarrow.types.is_floating(kind) or pyarrow.types.is_boolean(kind)


def _whole_labels(path: Path, labels: np.ndarray) -> np.ndarray:
    """Labels as int64 [n]; all may be -1, for none. Raises `InputError` with the row of another that is no label."""
    values = labels.astype(np.float64)
    wrong = np.flatnonzero(~((values == np.rint(values)) & (values >= -1) & (values < MAX_CLASSES)))
    if len(wrong):
        check_label(f"{path}: row {wrong[0]}", labels[wrong[0]].item())
    if 0 < np.count_nonzero(values == -1) < len(values):
        check_label(f"{path}: row {(values == -1).argmax()}", -1)
    return labels.astype(np.int64)


def _column(path: Path, name: str, fields: Sequence[Any], schema: Any) -> str:
    """The column with that name, or if there is none the only one, of those of the right type."""
    found = [field.name for field in fields]
    if name not in found and (len(found) != 1 or name in schema.names):
        kind = "the type {bytes, path}" if name == "image" else "integers"
        cure = ""
        if name in schema.names and "string" in str(schema.field(schema.get_field_index(name)).type):
            cure = f"; number its texts, as `class_encode_column({name!r})` of the library datasets does"
        raise InputError(f"{path}: has no column {name!r} of {kind}; its columns are {', '.join(schema.names)}{cure}")
    chosen = name if name in found else found[0]
    if schema.names.count(chosen) > 1:
        raise InputError(f"{path}: has the column {chosen!r} twice; remove one")
    return chosen


def _class_names(metadata: dict[bytes, bytes], label: str) -> tuple[str, ...]:
    """The names that the library `datasets` writes into the metadata of a schema; none if others wrote the file."""
    try:
        return tuple(map(str, parse_json(metadata[b"huggingface"])["info"]["features"][label]["names"]))
    except (KeyError, ValueError, TypeError):
        return ()


def _images(origin: Path, files: dict[Path, _File]) -> ParquetImages:
    groups, sizes = [], []
    for number, file in enumerate(files.values()):
        before = 0
        for group, rows in enumerate(file.rows):
            groups.append((number, group, before))
            sizes.append(rows)
            before += rows
    return ParquetImages(
        list(files),
        [str(path.relative_to(origin)) if origin.is_dir() else path.name for path in files],
        [file.image for file in files.values()],
        np.concatenate([file.labels for file in files.values()]),
        np.array(groups, np.int64).reshape(-1, 3),
        np.cumsum(sizes) - np.array(sizes, np.int64),
    )
