"""A .beton of images, and labels or targets: its records as numpy types, and a function that opens the file."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from widemix.errors import InputError
from widemix.formats.tables import (
    ALIGNED,
    ALLOCATING,
    ARRAY_FIELD,
    BYTES_FIELD,
    COEFFICIENTS_FIELD,
    FLOAT_FIELD,
    IMAGE_FIELD,
    INT_FIELD,
    JSON_FIELD,
    TENSOR_FIELD,
    Fields,
    Tables,
    open_tables,
    pieces,
    refuse,
    reopen,
)

JPEG, RAW, COEFFICIENTS = 0, 1, 2

IMAGE = np.dtype([("mode", "<u1"), ("width", "<u2"), ("height", "<u2"), ("data_ptr", "<u8")])
SAMPLE = np.dtype([("f0", IMAGE), ("f1", "<i8")], align=True)
BYTES = np.dtype([("ptr", "<u8"), ("size", "<u8")])
SEGMENTED = np.dtype([("f0", IMAGE), ("f1", "<i8"), ("f2", BYTES)], align=True)
TARGETED = np.dtype([("f0", IMAGE), ("f1", "<i8"), ("f2", "<u8")], align=True)
SEGMENTED_TARGETED = np.dtype([("f0", IMAGE), ("f1", "<i8"), ("f2", BYTES), ("f3", "<u8")], align=True)
ARRAY_ARGUMENTS = np.dtype([("shape", "<u8", 32), ("type_length", "<u8")])  # of an array field, before its dtype
TARGET = np.dtype("<f4")
SEGMENT_NUMBER = np.dtype("<u4")
NO_SEGMENTS = bytes(3 * SEGMENT_NUMBER.itemsize)

FIELDS = (("image", IMAGE_FIELD), ("label", INT_FIELD))
# Of each JPEG the uint32 numbers with which a reader decodes only the segments that a crop touches:
#     MCUs per segment, width of an MCU in pixels, height of an MCU in pixels,
#     start of each segment, end of the last one       (bytes from the start of the image's JPEG)
# A segment is what lies between two restart markers. A row of MCUs is a whole number of segments, rows are in order,
# and each segment except the last ends with its marker's two bytes. An image without segments has three zeros.
SEGMENT_FIELDS = (*FIELDS, ("segments", BYTES_FIELD))
COEFFICIENT_FIELDS = (("image", COEFFICIENTS_FIELD), ("label", INT_FIELD))  # see pipeline/formats/coefficients.py
TARGETS = ("targets", ARRAY_FIELD)  # numbers to predict, TARGET [n]; the label of each sample is -1 then
# The records of files that `widemix prep` writes, by their fields.
RECORDS = {
    FIELDS: SAMPLE,
    SEGMENT_FIELDS: SEGMENTED,
    COEFFICIENT_FIELDS: SAMPLE,
    (*FIELDS, TARGETS): TARGETED,
    (*COEFFICIENT_FIELDS, TARGETS): TARGETED,
    (*SEGMENT_FIELDS, TARGETS): SEGMENTED_TARGETED,
}
# What the record of a sample holds of each type of field.
RECORDED = {
    FLOAT_FIELD: "<f8",
    INT_FIELD: "<i8",
    IMAGE_FIELD: IMAGE,
    BYTES_FIELD: BYTES,
    ARRAY_FIELD: "<u8",
    JSON_FIELD: BYTES,
    TENSOR_FIELD: "<u8",
}


@dataclass(frozen=True)
class Beton:
    """An open file of images, and labels or targets. Image i is `bytes[offset[i] : offset[i] + size[i]]`.

    The places are views of the mapped file, which all ranks of a node share. A file that is truncated while it is
    mapped is a SIGBUS: who reads it for long takes the places from `read_records`.
    """

    path: Path
    bytes: np.ndarray  # uint8 [file size], memory-mapped, read-only
    mode: np.ndarray  # uint8 [n], JPEG, RAW or COEFFICIENTS
    width: np.ndarray  # int32 [n], pixels
    height: np.ndarray  # int32 [n], pixels
    offset: np.ndarray  # int64 [n], bytes from the start of the file
    size: np.ndarray  # int32 [n], bytes
    label: np.ndarray  # int32 [n]; -1 in a file of targets
    segments: np.ndarray  # int64 [n], bytes from the start of the file to the table of segments, see SEGMENT_FIELDS
    segments_size: np.ndarray  # int64 [n], bytes of that table; 0 if the file has none
    targets: np.ndarray  # int64 [n], bytes from the start of the file to the targets; 0 if the file has none
    target_count: int  # numbers that are the targets of a sample; 0 if the file has none
    records: np.ndarray  # [n] with the fields of one of RECORDS
    fields: Fields  # of the file
    records_at: int  # bytes from the start of the file

    def read_records(self, file: int, samples: np.ndarray) -> np.ndarray | None:
        """The records of samples, int [B], by an open descriptor; None if the file was truncated before one's end."""
        kind = self.records.dtype
        rows = np.empty(len(samples), kind)
        parts = rows.view(np.uint8).reshape(-1, kind.itemsize)
        for part, sample in zip(parts, samples.tolist(), strict=True):
            if os.preadv(file, [part.data], self.records_at + sample * kind.itemsize) < kind.itemsize:
                return None
        return rows

    def read_targets(self, file: int, records: np.ndarray) -> np.ndarray | None:
        """The targets of samples with these records, float32 [B, target_count]; None as `read_records`."""
        targets = np.empty((len(records), self.target_count), TARGET)
        if self.target_count:
            for row, place in zip(targets, records[f"f{len(self.fields) - 1}"].tolist(), strict=True):
                if os.preadv(file, [row.data], place) < row.nbytes:
                    return None
        return targets

    @property
    def stop(self) -> np.ndarray:
        """The end of each sample: int64 [n], bytes from the start of the file."""
        images = np.maximum(self.offset + self.size, self.segments + self.segments_size)
        return np.maximum(images, self.targets + self.target_count * TARGET.itemsize)

    def __len__(self) -> int:
        return len(self.label)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle has no bytes of the file, which is opened again."""
        return reopen, (open_beton, self.path.absolute())


def open_beton(path: Path) -> Beton:
    """Memory-map a .beton of images and labels or targets.

    Its fields are those of one of RECORDS; or FFCV's own, in any order: one RGBImageField of any name, and an
    IntField that is named label, or is the only one. Other fields are not read.

    Raises `InputError` unless every table and sample lies inside the file.
    """
    tables = open_tables(
        path, _layout, "image and label (one RGBImageField; an IntField of that name, or the only one)"
    )
    kinds = [kind for _, kind in tables.fields]
    plain = (IMAGE_FIELD, COEFFICIENTS_FIELD, INT_FIELD, BYTES_FIELD)
    if tables.arguments[[kind in plain for kind in kinds]].any():
        raise InputError(f"{path}: has fields with arguments, which images and labels do not take; prepare it again")
    modes = (JPEG, COEFFICIENTS) if COEFFICIENTS_FIELD in kinds else (JPEG,)
    before = kinds.index(COEFFICIENTS_FIELD if COEFFICIENTS in modes else IMAGE_FIELD)
    part = sum(kind in ALLOCATING for kind in kinds[:before])  # of the image, among those of a sample
    count, none = len(tables.samples), np.broadcast_to(np.int64(0), len(tables.samples))
    has_segments = tables.fields in RECORDS and tables.fields[: len(SEGMENT_FIELDS)] == SEGMENT_FIELDS
    width, height, sizes, label = (np.empty(count, np.int32) for _ in range(4))
    for piece in pieces(count):  # once over the file's tables, which are larger than any cache
        records, offset, size = tables.samples[piece], tables.offset[piece, part], tables.size[piece, part]
        image = records["f0"]
        width[piece], height[piece], sizes[piece], label[piece] = image["width"], image["height"], size, records["f1"]
        raw = width[piece].astype(np.int64) * height[piece] * 3
        misplaced = (image["data_ptr"].view(np.int64) != offset) | (sizes[piece] != size)
        is_raw = image["mode"] == RAW
        bad = misplaced | (raw == 0) | np.where(is_raw, size != raw, ~np.isin(image["mode"], modes))
        if has_segments:
            bad |= _misplaced_segments(records["f2"], tables.offset[piece, 1], tables.size[piece, 1])
        refuse(path, bad, piece.start)
        if (label[piece] != records["f1"]).any():
            raise InputError(f"{path}: has labels of more than 31 bits; prepare it again")
    targets, target_count = _targets(path, tables)
    segments = tables.samples["f2"] if has_segments else None
    return Beton(
        path=path,
        bytes=tables.bytes,
        mode=tables.samples["f0"]["mode"],
        width=width,
        height=height,
        offset=tables.samples["f0"]["data_ptr"].view(np.int64),
        size=sizes,
        segments=none if segments is None else segments["ptr"].view(np.int64),
        segments_size=none if segments is None else segments["size"].view(np.int64),
        targets=targets,
        target_count=target_count,
        label=label,
        records=tables.samples,
        fields=tables.fields,
        records_at=tables.samples_at,
    )


def _layout(fields: Fields) -> np.dtype | None:
    """The dtype of a record with the fields of SAMPLE at least, wherever they are; None if the file lacks one."""
    if fields in RECORDS:
        return RECORDS[fields]
    images = [place for place, (_, kind) in enumerate(fields) if kind == IMAGE_FIELD]
    numbers = [place for place, (_, kind) in enumerate(fields) if kind == INT_FIELD]
    labels = [place for place in numbers if fields[place][0] == "label"] or numbers
    if len(images) != 1 or len(labels) != 1 or not all(kind in RECORDED for _, kind in fields):
        return None
    record = np.dtype([(f"f{place}", RECORDED[kind]) for place, (_, kind) in enumerate(fields)], align=True)
    assert record.fields is not None
    offsets = [record.fields[f"f{place}"][1] for place in (*images, *labels)]
    return np.dtype(
        {"names": ["f0", "f1"], "formats": [IMAGE, "<i8"], "offsets": offsets, "itemsize": record.itemsize}
    )


def _misplaced_segments(field: np.ndarray, offset: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Whether tables of segments are not at the places, int64 [n], that the allocation table has: bool [n]."""
    begins, sizes = field["ptr"].view(np.int64), field["size"].view(np.int64)
    return (begins != offset) | (sizes != size) | ((offset | size) & (ALIGNED - 1) != 0) | (size < 12)


def _targets(path: Path, tables: Tables) -> tuple[np.ndarray, int]:
    """The offset of each sample's targets in bytes, int64 [n], and how many there are; zeros in a file of labels.

    A file of another program may have an array of that name beside its labels.
    """
    none = np.broadcast_to(np.int64(0), len(tables.offset)), 0
    if tables.fields not in RECORDS or tables.fields[-1] != TARGETS:
        return none
    arguments = tables.arguments[-1]
    shape = arguments[: ARRAY_ARGUMENTS.itemsize].view(ARRAY_ARGUMENTS)["shape"][0]
    labels = tables.samples["f1"]
    if any((labels[piece] != -1).any() for piece in pieces(len(labels))):
        return none
    count = int(shape[0])
    if arguments.tobytes().rstrip(b"\0") != array_arguments(TARGET, count) or count == 0:
        raise InputError(f"{path}: its targets are not a row of 32-bit floats for each sample; prepare it again")
    places = tables.samples[f"f{len(tables.fields) - 1}"].view(np.int64)
    for piece in pieces(len(places)):
        offset, size = tables.offset[piece, -1], tables.size[piece, -1]
        misplaced = (places[piece] != offset) | (size != count * TARGET.itemsize) | (offset % ALIGNED != 0)
        refuse(path, misplaced, piece.start)
    return places, count


def array_arguments(kind: np.dtype, length: int) -> bytes:
    """FFCV's arguments of a field of arrays of `length` numbers, without the zeros at their end."""
    described = json.dumps(kind.descr).encode("ascii")
    arguments = np.zeros(1, ARRAY_ARGUMENTS)
    arguments["shape"][0, 0], arguments["type_length"] = length, len(described)
    return arguments.tobytes() + described
