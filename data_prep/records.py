"""The fields of a .beton, and its samples as the writer takes them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from widemix.data_prep.image import Encoded
from widemix.data_prep.samples import Origin
from widemix.formats.beton import FIELDS, RECORDS, SEGMENT_FIELDS, TARGET, TARGETS, array_arguments
from widemix.formats.checksums import crc32c
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
