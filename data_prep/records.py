"""The fields of a .beton, and its samples as the writer takes them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from widemix.data_prep.samples import FileSlice, Origin
from widemix.formats.beton import FIELDS, RAW, RECORDS, SEGMENT_FIELDS, TARGET, TARGETS, array_arguments
from widemix.formats.checksums import crc32c, image_chunks, sample_checksum
from widemix.formats.tables import ALLOCATING, TYPES, Fields
from widemix.formats.text import FIELDS as TEXT_FIELDS
from widemix.formats.text import SAMPLE, TOKEN


class Layout(NamedTuple):
    """The fields of a file, as (name, FFCV's type, FFCV's arguments), and the dtype of a sample's record."""

    fields: tuple[tuple[str, int, bytes], ...]
    sample: np.dtype

    @property
    def parts(self) -> int:
        """The number of fields that have data."""
        return sum(kind in ALLOCATING for _, kind, _ in self.fields)

    @property
    def types(self) -> dict[str, str]:
        """The name of FFCV's type for each field name."""
        return {name: TYPES[kind] for name, kind, _ in self.fields}


def image_layout(fields: Fields, targets: int = 0) -> Layout:
    """The layout of a file of images with these fields, and with so many targets if they are not 0."""
    described = tuple((name, kind, b"") for name, kind in fields)
    if targets:
        fields, described = (*fields, TARGETS), (*described, (*TARGETS, array_arguments(TARGET, targets)))
    return Layout(described, RECORDS[fields])


IMAGES, SEGMENTED_IMAGES = image_layout(FIELDS), image_layout(SEGMENT_FIELDS)


class Encoded(NamedTuple):
    """A sample ready to be written; without `data` and `source` for a corrupt image that is left out.

    `segments` is the table of its restart segments, in files that have that field. If the file's own bytes are kept,
    `source` is where they are, and `data` may be empty.
    """

    name: str
    label: int
    mode: int  # JPEG, RAW or COEFFICIENTS
    width: int  # pixels
    height: int  # pixels
    data: bytes
    rule: str  # what had to be done to an unusual image, or ""
    segments: bytes = b""
    source: FileSlice | None = None
    checksum: int | None = None  # of the sample, computed with it
    origin: Origin = Origin()
    targets: bytes = b""  # float32 each, in files of targets; the label is -1 then

    @property
    def parts(self) -> tuple[bytes, ...]:
        """The data of its fields: the image and, where they are, the table of segments and the targets."""
        data = self.source.read() if self.source and not self.data else self.data
        return tuple(part for part in (data, self.segments, self.targets) if part) if data else ()

    def numbers(self, parts: Sequence[bytes]) -> tuple[int, ...]:
        """The numbers of which the sample's checksum is made, before those of its blocks."""
        label = crc32c(self.targets) if self.targets else self.label
        return self.mode, self.width, self.height, label, len(parts[0]), len(self.segments)

    def blocks(self, parts: Sequence[bytes]) -> list[int]:
        """The CRC-32C of each of its blocks."""
        return image_chunks(self.mode, self.width, parts[0], self.segments)

    @property
    def has_bands(self) -> bool:
        """Whether the checksums of its blocks are stored too."""
        return self.mode == RAW

    def with_checksum(self) -> "Encoded":
        """The same with its checksum."""
        parts = self.parts
        checksum = sample_checksum(self.numbers(parts), self.blocks(parts)) if parts else None
        return self._replace(checksum=checksum)

    def for_transfer(self) -> "Encoded":
        """The same without bytes that another process can read from `source`."""
        return self._replace(data=b"") if self.source else self

    def row(self, positions: Sequence[int]) -> tuple:
        """The record in the file's table of samples, with the parts at these positions (bytes)."""
        image = self.mode, self.width, self.height, positions[0]
        segments = ((positions[1], len(self.segments)),) if self.segments else ()
        return image, self.label, *segments, *((positions[-1],) if self.targets else ())


class EncodedPair(NamedTuple):
    """A sentence pair ready to be written: [CLS] first [SEP] second [SEP] [PAD] ..."""

    name: str
    data: bytes  # of int32 tokens
    rule: str  # always ""
    length: int  # tokens before the padding
    second: int  # tokens before the second sentence
    label: int
    origin: Origin = Origin()
    checksum: int | None = None

    @property
    def parts(self) -> tuple[bytes, ...]:
        """The data of its fields: the tokens."""
        return (self.data,)

    def numbers(self, parts: Sequence[bytes]) -> tuple[int, ...]:
        """The numbers of which the sample's checksum is made, before those of its blocks."""
        return self.length, self.second, self.label, len(self.data)

    def blocks(self, parts: Sequence[bytes]) -> list[int]:
        """The CRC-32C of the tokens."""
        return [crc32c(self.data)]

    @property
    def has_bands(self) -> bool:
        """Whether the checksums of its blocks are stored too."""
        return False

    def row(self, positions: Sequence[int]) -> tuple:
        """The record in the file's table of samples, with the parts at these positions (bytes)."""
        return positions[0], self.length, self.second, self.label


Record = Encoded | EncodedPair  # a sample ready to be written


def text_layout(tokens: int) -> Layout:
    """The layout of a file with arrays of `tokens` tokens."""
    described = (array_arguments(TOKEN, tokens), b"", b"", b"")
    return Layout(tuple((*field, extra) for field, extra in zip(TEXT_FIELDS, described, strict=True)), SAMPLE)
