"""Tokenised sentence pairs in FFCV's format."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from widemix.formats.beton import ARRAY_ARGUMENTS
from widemix.formats.tables import ARRAY_FIELD, INT_FIELD, open_tables, refuse, reopen

TOKENIZER = "tokenizer.json"  # file name of the tokenizer, next to the data
TOKEN = np.dtype("<i4")
FIELDS = (("tokens", ARRAY_FIELD), ("length", INT_FIELD), ("second", INT_FIELD), ("label", INT_FIELD))
SAMPLE = np.dtype([("f0", "<u8"), ("f1", "<i8"), ("f2", "<i8"), ("f3", "<i8")], align=True)


@dataclass(frozen=True)
class TextBeton:
    """An open file of token arrays and labels."""

    path: Path
    bytes: np.ndarray  # uint8 [file size], memory-mapped, read-only
    tokens: int  # length of each array, with padding
    offset: np.ndarray  # int64 [n], bytes from the start of the file
    size: np.ndarray  # int64 [n], bytes
    length: np.ndarray  # int64 [n], tokens before the padding
    second: np.ndarray  # int64 [n], tokens before the second sentence
    label: np.ndarray  # int64 [n]

    @property
    def target_count(self) -> int:
        """Pairs have labels, not targets."""
        return 0

    @property
    def stop(self) -> np.ndarray:
        """The end of each sample: int64 [n], bytes from the start of the file."""
        return self.offset + self.size

    def __len__(self) -> int:
        return len(self.label)

    def __reduce__(self) -> tuple[Any, ...]:
        """As `Beton`."""
        return reopen, (open_text, self.path.absolute())

    def __getitem__(self, index: int) -> np.ndarray:
        """The tokens of a pair, int32 [tokens], with padding."""
        start = self.offset[index]
        return self.bytes[start : start + self.size[index]].view(TOKEN)


def open_text(path: Path) -> TextBeton:
    """Memory-map a .beton of token arrays. Raises `InputError` unless every table and sample lies inside the file."""
    tables = open_tables(path, lambda fields: SAMPLE if fields == FIELDS else None, "tokens and length")
    tokens = int(tables.arguments[0, : ARRAY_ARGUMENTS.itemsize].view(ARRAY_ARGUMENTS)["shape"][0, 0])
    length, second, label = (tables.samples[field].astype(np.int64) for field in ("f1", "f2", "f3"))
    offset, size = tables.offset[:, 0].copy(), tables.size[:, 0].copy()  # read where the file may be truncated
    misplaced = tables.samples["f0"].astype(np.int64) != offset
    refuse(path, misplaced | (size != tokens * TOKEN.itemsize) | (second < 0) | (second > length) | (length > tokens))
    return TextBeton(path, tables.bytes, tokens, offset, size, length, second, label)
