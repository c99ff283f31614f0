"""Tokenised sentence pairs as records for the writer."""

from collections.abc import Sequence
from typing import NamedTuple

from widemix.data_prep.layout import Layout
from widemix.data_prep.samples import Origin
from widemix.formats.beton import array_arguments
from widemix.formats.checksums import crc32c
from widemix.formats.text import FIELDS, SAMPLE, TOKEN


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


def text_layout(tokens: int) -> Layout:
    """The layout of a file with arrays of `tokens` tokens."""
    described = (array_arguments(TOKEN, tokens), b"", b"", b"")
    return Layout(tuple((*field, extra) for field, extra in zip(FIELDS, described, strict=True)), SAMPLE)
