"""Makes a prepared folder of FFCV's own .beton files, which stay as they are: links, checksums and a manifest.

Their fields may have any order and names: see `open_beton`. Every JPEG is decoded once, because the checksum of a
damaged one would only say that it is still as damaged.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from widemix.cgroups import usable_cpus
from widemix.data_prep.image_processes import encode_all
from widemix.data_prep.prep_dir import UNFINISHED, check_target, prep_dir, rename_finished, translate_errors
from widemix.data_prep.records import Encoded
from widemix.data_prep.samples import FileSlice, Sample
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources.labels import check_label
from widemix.data_prep.write_dataset import LISTED, print_untrained
from widemix.errors import InputError, RunError
from widemix.files import atomic_write, real_path
from widemix.formats.beton import COEFFICIENTS, JPEG, RAW, Beton, open_beton
from widemix.formats.checksums import NUMBER, SUFFIX, crc32c, sample_checksum
from widemix.formats.chunks import hash_bytes, hash_chunks
from widemix.formats.manifest import NAME, Manifest, Split, count_labels
from widemix.formats.tables import TYPES
from widemix.progress_line import print_status, track

SOURCE = "beton"  # in the manifest
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)  # of FAT, exFAT, some mounts of SMB
AS_STORED = PrepSettings(max_size=0)  # with which JPEGs are only checked


@dataclass(frozen=True)
class _Stored(Sequence[Sample]):
    """The images of a file."""

    beton: Beton

    def __len__(self) -> int:
        return len(self.beton)

    def __getitem__(self, index):
        beton = self.beton
        start, size = int(beton.offset[index]), int(beton.size[index])
        image: FileSlice | np.ndarray = FileSlice(str(beton.path), start, size)
        if beton.mode[index] == RAW:
            shape = beton.height[index], beton.width[index], 3
            image = beton.bytes[start : start + size].reshape(shape)
        return Sample(f"{beton.path.name}[{index}]", int(beton.label[index]), image)


@translate_errors()
def adopt(
    betons: Mapping[str, Path], to: Path, classes: Sequence[str] = (), *, processes: int | None = None
) -> Manifest:
    """Make a prepared folder of FFCV's files, one per split, in the new or empty folder `to`; returns its manifest.

    betons: path by the name of its split. classes: names in label order; by default the numbers of the labels.

    The files are neither copied nor changed: `to` gets hard links, or symbolic ones if it is on another file system.
    Raises `InputError` for files that cannot be read, and `RunError`, after a list, for damaged images.
    """
    if (to / NAME).exists():
        raise InputError(f"{to}: is already prepared; name a new or an empty folder")
    places = {split: real_path(path) for split, path in betons.items()}
    for split, path in betons.items():
        if places[split].parent == real_path(to):
            raise InputError(f"--to {to}: holds {path} itself; name another folder")
    check_target(to, force=False)
    opened = {split: open_beton(place) for split, place in places.items()}
    for beton in opened.values():
        check_label(str(beton.path), max(0, int(beton.label.max())))
    names = tuple(classes) or tuple(map(str, range(1 + max(int(beton.label.max()) for beton in opened.values()))))
    for beton in opened.values():
        if (beton.mode == COEFFICIENTS).any():
            raise InputError(
                f"{beton.path}: holds coefficients, not FFCV's images; use the folder that it was made in"
            )
        if beton.target_count:
            raise InputError(f"{beton.path}: holds targets instead of classes; prepare them from their source")
        if beton.label.min() < -1 or beton.label.max() >= len(names):
            raise InputError(
                f"{beton.path}: has labels from {beton.label.min()} to {beton.label.max()}, and there "
                f"are {len(names)} classes"
            )
    origin = ", ".join(str(beton.path) for beton in opened.values())
    with prep_dir(to, {"source": SOURCE, "from": origin}, force=False):
        splits, files, exceptions = {}, {}, []
        for split, beton in opened.items():
            files[f"{split}{SUFFIX}"], unusual = _check(split, beton, processes or usable_cpus())
            exceptions += unusual
            splits[split] = Split(
                file=f"{split}.beton",
                bytes=len(beton.bytes),
                samples=len(beton),
                per_class=count_labels(beton.label, len(names)),
                fields={name: TYPES[kind] for name, kind in beton.fields},
                blocks=hash_chunks(beton.path),
            )
            _link(beton.path, to / f"{split}.beton{UNFINISHED}")
        for name, data in files.items():
            atomic_write(to / f"{name}{UNFINISHED}", data)
        manifest = Manifest(
            source=SOURCE,
            origin=origin,
            classes=names,
            splits=splits,
            settings={},
            versions={},
            exceptions=tuple(exceptions),
            files={name: hash_bytes(data) for name, data in files.items()},
        )
        rename_finished(to, manifest)
    print_untrained(to, manifest)
    return manifest


def _link(path: Path, link: Path) -> None:
    try:
        os.link(path, link)
    except OSError:  # another file system, or one without hard links
        try:
            link.symlink_to(path)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            raise InputError(
                f"{link.parent}: its disk has no links, of which the folder would consist; name one on another disk, "
                f"such as that of {path}"
            ) from None


def _check(split: str, beton: Beton, processes: int) -> tuple[bytes, list[dict[str, str]]]:
    """Decode every image of a file: the content of its file of checksums, and which images are unusual."""
    samples, checksums, bands = _Stored(beton), np.empty(len(beton), NUMBER), bytearray()
    exceptions, damaged = [], []
    workers = processes if (beton.mode == JPEG).any() else 1
    with (
        closing(encode_all(samples, 0, AS_STORED, workers)) as records,
        closing(track(records, split, len(beton), "images")) as counted,
    ):
        for number, record in enumerate(counted):
            reason = _damage(beton, number, record)
            if reason:
                damaged.append(f"{record.name}: {reason}")
                continue
            if record.rule:
                exceptions.append({"file": record.name, "rule": record.rule})
            start, length = int(beton.segments[number]), int(beton.segments_size[number])  # none in FFCV's own files
            segments = crc32c(beton.bytes[start : start + length].tobytes())
            blocks = record.blocks(record.parts) if record.mode == RAW else [record.origin.checksum, segments]
            bands += np.array(blocks, NUMBER).tobytes() if record.mode == RAW else b""
            size = beton.width[number], beton.height[number], beton.label[number], beton.size[number]
            checksums[number] = sample_checksum((int(beton.mode[number]), *map(int, size), length), blocks)
    if damaged:
        for line in damaged[:LISTED]:
            print_status(line)
        raise RunError(f"{beton.path}: {len(damaged)} of {len(beton)} images are damaged; write the file again")
    return checksums.tobytes() + bytes(bands), exceptions


def _damage(beton: Beton, number: int, record: Encoded) -> str:
    """Return what is wrong with an image, or ""."""
    if record.rule.startswith(("left out: ", "repaired: ")):
        return record.rule.partition(": ")[2]
    stated = int(beton.width[number]), int(beton.height[number])
    if stated != (record.width, record.height):
        return f"has {record.width} x {record.height} pixels, and the file says {stated[0]} x {stated[1]}"
    return ""
