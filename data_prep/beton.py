"""FFCV's .beton format, version 2, as numpy types, and an opening that refuses what is damaged.

Layout: header, field descriptors, one metadata record a sample, pages of data, allocation table. FFCV's own
`Reader` trusts all of it and importing it costs 4 s a process (a numba dictionary is compiled at import), so
the types stand here; `tests/data_prep/test_beton.py` holds them equal to FFCV's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.errors import InputError

VERSION = 2
INT_FIELD, IMAGE_FIELD, BYTES_FIELD, ARRAY_FIELD = 1, 2, 3, 4
TYPES = {INT_FIELD: "IntField", IMAGE_FIELD: "RGBImageField", BYTES_FIELD: "BytesField", ARRAY_FIELD: "NDArrayField"}
JPEG, RAW = 0, 1

HEADER = np.dtype(
    [
        ("version", "<u2"),
        ("num_fields", "<u2"),
        ("page_size", "<u4"),
        ("num_samples", "<u8"),
        ("table", "<u8"),
    ],
    align=True,
)
FIELD = np.dtype([("type_id", "<u1"), ("name", ("<u1", 16)), ("arguments", ("<u1", (1024,)))], align=True)
IMAGE = np.dtype([("mode", "<u1"), ("width", "<u2"), ("height", "<u2"), ("data_ptr", "<u8")])
SAMPLE = np.dtype([("f0", IMAGE), ("f1", "<i8")], align=True)
ALLOCATION = np.dtype([("sample_id", "<u8"), ("ptr", "<u8"), ("size", "<u8")])

FIELDS = (("image", IMAGE_FIELD), ("label", INT_FIELD))


@dataclass(frozen=True)
class Beton:
    """An opened file of pictures and labels. `bytes` maps the file; `offset` and `size` say where sample i lies."""

    path: Path
    bytes: np.ndarray  # uint8 [file size], mapped, read-only
    mode: np.ndarray  # uint8 [n], JPEG or RAW
    width: np.ndarray  # int64 [n], pixels
    height: np.ndarray  # int64 [n], pixels
    offset: np.ndarray  # int64 [n], bytes from the start of the file
    size: np.ndarray  # int64 [n], bytes
    label: np.ndarray  # int64 [n]

    def __len__(self) -> int:
        return len(self.label)


class Tables(NamedTuple):
    """What a file of any fields says of its samples, checked as far as that goes without knowing the fields."""

    bytes: np.ndarray  # uint8 [file size], mapped, read-only
    arguments: np.ndarray  # uint8 [fields, 1024], of each field
    samples: np.ndarray  # one record a sample
    offset: np.ndarray  # int64 [n], bytes from the start of the file
    size: np.ndarray  # int64 [n], bytes


def open_beton(path: Path) -> Beton:
    """Map a .beton of (image, label) samples; `InputError` unless every table and sample lies inside the file."""
    tables = open_tables(path, FIELDS, SAMPLE)
    image = tables.samples["f0"]
    beton = Beton(
        path=path,
        bytes=tables.bytes,
        mode=np.ascontiguousarray(image["mode"]),
        width=image["width"].astype(np.int64),
        height=image["height"].astype(np.int64),
        offset=image["data_ptr"].astype(np.int64),
        size=tables.size,
        label=tables.samples["f1"].astype(np.int64),
    )
    raw = beton.width * beton.height * 3
    refuse(
        path,
        (beton.offset != tables.offset)
        | ((beton.mode != JPEG) & (beton.mode != RAW))
        | ((beton.mode == RAW) & (beton.size != raw))
        | (raw == 0),
    )
    return beton


def open_tables(path: Path, fields: tuple[tuple[str, int], ...], sample: np.dtype) -> Tables:
    """Map a file of the given fields (name, type) and sample records, or `InputError`."""
    try:
        mapped = np.memmap(path, np.uint8, "r")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; `widemix prep` writes it") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None

    header = _table(path, mapped, HEADER, 0, 1)[0]
    if header["version"] != VERSION:
        raise InputError(f"{path}: version {header['version']} of FFCV's format; this reads version {VERSION}")
    described = _table(path, mapped, FIELD, HEADER.itemsize, int(header["num_fields"]))
    found = tuple((_name(field["name"]), int(field["type_id"])) for field in described)
    if found != fields:
        wanted = " and ".join(name for name, _ in fields)
        raise InputError(f"{path}: holds {', '.join(name for name, _ in found)}, not {wanted}")

    count = int(header["num_samples"])
    samples = _table(path, mapped, sample, HEADER.itemsize + described.nbytes, count)
    table = _table(path, mapped, ALLOCATION, int(header["table"]), count)
    if int(header["table"]) + table.nbytes != len(mapped):
        raise InputError(f"{path}: has bytes after its allocation table, or its header is damaged; prepare it again")
    order = np.argsort(table["sample_id"], kind="stable")
    if not np.array_equal(table["sample_id"][order], np.arange(count)):
        raise InputError(f"{path}: was never finished, or its allocation table is damaged; prepare it again")
    offset, size = (table[name][order].astype(np.int64) for name in ("ptr", "size"))
    _check_places(path, offset, size, HEADER.itemsize + described.nbytes + samples.nbytes, int(header["table"]))
    return Tables(mapped, described["arguments"], samples, offset, size)


def refuse(path: Path, bad: np.ndarray) -> None:
    """`InputError` naming the first sample for which `bad`, bool [n], holds."""
    if bad.any():
        raise InputError(f"{path}: sample {int(bad.argmax())} does not lie inside the file; prepare it again")


def _name(field: np.ndarray) -> str:
    return field.tobytes().rstrip(b"\0").decode("ascii", "replace")


def _table(path: Path, mapped: np.ndarray, kind: np.dtype, offset: int, count: int) -> np.ndarray:
    if offset + count * kind.itemsize > len(mapped):
        raise InputError(f"{path}: is cut short at {len(mapped)} bytes; prepare it again")
    return np.frombuffer(mapped, kind, count, offset)


def _check_places(path: Path, offset: np.ndarray, size: np.ndarray, start: int, stop: int) -> None:
    """Every sample lies between `start` and `stop`, on its own. A sum of offset and size could overflow."""
    refuse(path, (offset < start) | (size <= 0) | (size > stop - offset))
    order = np.argsort(offset, kind="stable")
    gap = offset[order][1:] - (offset + size)[order][:-1]
    if (gap < 0).any():
        raise InputError(
            f"{path}: samples {order[gap.argmin()]} and {order[gap.argmin() + 1]} overlap; prepare it again"
        )
