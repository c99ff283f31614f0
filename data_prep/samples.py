"""What a source returns: for each split a sequence of samples with labels, whose images are not read yet."""

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.errors import InputError


class FileSlice(NamedTuple):
    """Part of a file: `size` bytes from byte `offset` on; -1 for all up to the end."""

    path: str
    offset: int = 0
    size: int = -1

    def read(self) -> bytes:
        """The bytes. Raises `InputError` if there are fewer, or if the path is not a regular file."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for a FIFO's writer
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    raise InputError(f"{self.path}: is not a regular file")
                size = self.size if self.size >= 0 else max(0, status.st_size - self.offset)
                data = os.pread(file, size, self.offset)
            finally:
                os.close(file)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror})") from None
        if len(data) < size:
            raise InputError(f"{self.path}: ends at {self.offset + len(data)} bytes, within a sample")
        return data


class Sample(NamedTuple):
    """An image that is not encoded yet: part of a file, or uint8 pixels [height, width, 3] that are stored raw."""

    name: str  # in messages and in the manifest
    label: int
    picture: FileSlice | np.ndarray


@dataclass(frozen=True)
class Dataset:
    """The contents of a source: class names in label order, and the samples of each split."""

    classes: tuple[str, ...]
    splits: Mapping[str, Sequence[Any]]  # of `Sample`, or of `data_prep.pairs.Pair`
    exceptions: tuple[dict[str, str], ...] = ()  # unexpected files: {"file": name, "rule": what is unusual}
    text: bool = False  # whether the samples are sentence pairs


@dataclass(frozen=True)
class PictureFiles(Sequence[Sample]):
    """Image files under `root`. `Sample`s are made on access, which keeps a million of them small."""

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
    """Images within one file, such as a tar."""

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
    """Images in memory: uint8 [n, height, width, 3], stored raw."""

    name: str
    pixels: np.ndarray
    labels: np.ndarray  # int [n]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index):
        return Sample(f"{self.name}[{index}]", int(self.labels[index]), self.pixels[index])
