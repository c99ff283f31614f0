"""What a source hands to the writer: pictures with labels, split by split, none of them read yet."""

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.errors import InputError


class FileSlice(NamedTuple):
    """Where the bytes of a picture lie: `size` bytes from `offset`, or the rest of the file."""

    path: str
    offset: int = 0
    size: int = -1

    def read(self) -> bytes:
        """The bytes, or `InputError`, for fewer than there should be and for what is no file, too."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for who may write to a FIFO
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    raise InputError(f"{self.path}: is no file")
                size = self.size if self.size >= 0 else max(0, status.st_size - self.offset)
                data = os.pread(file, size, self.offset)
            finally:
                os.close(file)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror})") from None
        if len(data) < size:
            raise InputError(f"{self.path}: ends at {self.offset + len(data)} bytes, within a picture")
        return data


class Sample(NamedTuple):
    """A picture yet to be encoded: on disk, or uint8 pixels [height, width, 3] that are stored raw."""

    name: str  # what messages and the manifest call it
    label: int
    picture: FileSlice | np.ndarray


@dataclass(frozen=True)
class Dataset:
    """A source that has been listed: class names in label order, the samples of each split, what was odd."""

    classes: tuple[str, ...]
    splits: Mapping[str, Sequence[Any]]  # of Sample, or of Pair
    exceptions: tuple[dict[str, str], ...] = ()  # files that are not what they should be: {"file", "rule"}
    text: bool = False  # the samples are sentence pairs (`data_prep.pairs.Pair`), not pictures


@dataclass(frozen=True)
class PictureFiles(Sequence[Sample]):
    """Files under `root` by name; samples are made when asked for, so a million of them stay small."""

    root: Path
    names: Sequence[str]  # relative to root
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index):
        name = self.names[index]
        return Sample(name, self.labels[index], FileSlice(f"{self.root}/{name}"))


@dataclass(frozen=True)
class PictureSlices(Sequence[Sample]):
    """Pictures within one file, such as a tar."""

    path: str
    names: Sequence[str]
    labels: Sequence[int]
    offsets: np.ndarray  # int64 [n], bytes
    sizes: np.ndarray  # int64 [n], bytes

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index):
        place = FileSlice(self.path, int(self.offsets[index]), int(self.sizes[index]))
        return Sample(self.names[index], self.labels[index], place)


@dataclass(frozen=True)
class PixelArrays(Sequence[Sample]):
    """Pictures that lie in memory: uint8 [n, height, width, 3], stored raw."""

    name: str
    pixels: np.ndarray
    labels: np.ndarray  # int [n]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index):
        return Sample(f"{self.name}[{index}]", int(self.labels[index]), self.pixels[index])
