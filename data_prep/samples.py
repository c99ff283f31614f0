"""The dataset that a source returns: for each split samples with labels, whose images are not read yet."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from widemix.errors import InputError
from widemix.files import open_regular

PIECE = 1 << 30  # bytes read by one call, of which Linux allows 2 GiB at most


class Status(NamedTuple):
    """The status of a file, which differs when the file is changed."""

    size: int = -1  # bytes
    mtime_ns: int = 0
    ctime_ns: int = 0


IN_MEMORY = Status()  # of samples that were read with the listing, so that only their content can be compared


class Place(Protocol):
    """Where the bytes of an image are."""

    def status(self) -> Status:
        """The status of the file that holds them. Raises `InputError` if it cannot be read."""

    def read(self) -> bytes:
        """The bytes. Raises `InputError` if they cannot be read."""

    def read_with_status(self) -> tuple[bytes, Status]:
        """The bytes, and the status of the file before they were read. Raises `InputError` as `read` does."""


class FileSlice(NamedTuple):
    """Part of a file: `size` bytes from byte `offset` on; -1 for all up to the end."""

    path: str
    offset: int = 0
    size: int = -1

    def status(self) -> Status:
        """The status of the file. Raises `InputError` if it cannot be read."""
        try:
            return _status(os.stat(self.path))
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror})") from None

    def read(self) -> bytes:
        """The bytes. Raises `InputError` if there are fewer, or if the path is not a regular file."""
        return self.read_with_status()[0]

    def read_with_status(self) -> tuple[bytes, Status]:
        """The bytes, and the status of the file before they were read. Raises `InputError` as `read` does."""
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                size = self.size if self.size >= 0 else max(0, status.st_size - self.offset)
                places = range(self.offset, self.offset + size, PIECE)
                data = b"".join(
                    os.pread(file.fileno(), min(PIECE, self.offset + size - place), place) for place in places
                )
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror})") from None
        if len(data) < size:
            raise InputError(f"{self.path}: ends at {self.offset + len(data)} bytes, within a sample")
        return data, _status(status)


def _status(status: os.stat_result) -> Status:
    return Status(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class Sample(NamedTuple):
    """An image that is not encoded yet: bytes at a place, or uint8 pixels [height, width, 3] that are stored raw."""

    name: str  # in messages and in the manifest
    label: int
    image: Place | np.ndarray
    targets: bytes = b""  # float32 each, in a dataset of targets; the label is -1 then

    def content(self) -> bytes:
        """The source's bytes, or the pixels."""
        return self.image.tobytes() if isinstance(self.image, np.ndarray) else self.image.read()

    def status(self) -> Status:
        """The status of the file that it is part of."""
        return IN_MEMORY if isinstance(self.image, np.ndarray) else self.image.status()


class Origin(NamedTuple):
    """The CRC-32C of the `content` that a sample was read from, and the status of the file then."""

    checksum: int = 0
    status: Status = IN_MEMORY


@dataclass(frozen=True)
class Dataset:
    """The contents of a source: class names in label order, or names of targets, and the samples of each split."""

    classes: tuple[str, ...]
    splits: Mapping[str, Sequence[Any]]  # of `Sample`, or of `widemix.data_prep.sources.pairs.Pair`
    exceptions: tuple[dict[str, str], ...] = ()  # unexpected files: {"file": name, "rule": what is unusual}
    text: bool = False  # whether the samples are sentence pairs
    check_files: Callable[[], tuple[dict[str, str], ...]] = tuple  # more exceptions, which take long to find
    targets: bool = False  # whether samples have a number for each of `classes`, and no label


@dataclass(frozen=True)
class ImageFiles(Sequence[Sample]):
    """Image files under `root`. `Sample`s are made on access, which keeps a million of them small."""

    root: Path
    names: Sequence[str]  # relative to root
    labels: Sequence[int]
    targets: Sequence[np.ndarray] | None = None  # float32 [targets] of each, in a dataset of targets

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index):
        name = self.names[index]
        targets = b"" if self.targets is None else self.targets[index].tobytes()
        return Sample(name, self.labels[index], FileSlice(f"{self.root}/{name}"), targets)


@dataclass(frozen=True)
class TarImages(Sequence[Sample]):
    """Images in several tars. `Sample`s are made on access, which keeps millions of them small."""

    tars: Sequence[Path]
    places: Sequence[str]  # of the tars, in the names of samples
    tar: np.ndarray  # int64 [n], which of them
    names: np.ndarray  # bytes [n], UTF-8
    labels: np.ndarray  # int64 [n]
    offsets: np.ndarray  # int64 [n], bytes
    sizes: np.ndarray  # int64 [n], bytes

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index):
        tar = self.tar[index]
        place = FileSlice(str(self.tars[tar]), int(self.offsets[index]), int(self.sizes[index]))
        name = self.names[index].decode("utf-8", "surrogateescape")
        return Sample(f"{self.places[tar]}/{name}", int(self.labels[index]), place)


@dataclass(frozen=True)
class PixelArrays(Sequence[Sample]):
    """Images in memory: uint8 [n, height, width, 3], stored raw."""

    name: str
    pixels: np.ndarray
    labels: np.ndarray  # int [n]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index):
        return Sample(f"{self.name}[{index}]", int(self.labels[index]), self.pixels[index])
