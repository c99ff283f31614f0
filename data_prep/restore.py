"""The image files of a prepared folder, written again: of coefficients byte for byte those that were prepared."""

import os
from contextlib import closing
from pathlib import Path

import numpy as np

from widemix.data_prep.coefficients import unpack
from widemix.data_prep.prep_dir import check_outside, translate_errors
from widemix.errors import InputError
from widemix.files import atomic_write
from widemix.formats.beton import COEFFICIENTS, RAW, Beton, open_beton
from widemix.formats.checksums import MISMATCH, Checksums, compute_checksums, crc32c, open_checksums
from widemix.formats.manifest import read_manifest, split_path
from widemix.formats.sources import SUFFIX, damaged_sample, read_sources
from widemix.tally import track

JPEG_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif")


@translate_errors()
def restore(prepared: Path, to: Path) -> dict[str, tuple[int, int]]:
    """Write the files of a prepared folder, or of one of its .beton files, below `to`, by the samples' names.

    Returns for each split how many files there are, and how many of them are not the bytes that were prepared, since
    prep has changed the image: their names end as a JPEG's. A file that is there already with these bytes stays.

    Raises `InputError` for damaged samples, pixels, names that meet in one path, and other files in the way.
    """
    folder, paths = prepared, []
    if prepared.is_dir():
        manifest = read_manifest(prepared)
        paths = [split_path(prepared, name, manifest) for name in manifest.splits]
    else:
        folder, paths = prepared.parent, [prepared]
    betons = [open_beton(path) for path in paths]
    check_outside(to, folder.resolve())
    return {beton.path.stem: _restore(beton, to) for beton in betons}


def _restore(beton: Beton, to: Path) -> tuple[int, int]:
    path = beton.path
    if (beton.mode == RAW).any():
        raise InputError(f"{path}: holds pixels, of which no file can be restored")
    checksums, sources = open_checksums(beton), read_sources(path)
    if 1 + max((sample for sample, _ in sources.values()), default=-1) != len(beton):  # a name may be there twice
        raise InputError(f"{path.with_suffix(SUFFIX)}: is of another file; prepare the folder again")
    taken: dict[str, str] = {}
    others = 0
    with closing(track(sources.items(), path.stem, len(sources), "files")) as counted:
        for name, (sample, source) in counted:
            data = _read(beton, checksums, sample)
            place = os.path.normpath(f"/{name}")[1:]  # within `to`, whatever the name
            if crc32c(data) != source:
                others += 1
                place += "" if place.lower().endswith(JPEG_SUFFIXES) else ".jpg"
            if place in taken:
                raise InputError(f"{path}: {name} and {taken[place]} would be the same file")
            taken[place] = name
            _write(to / place, data)
    return len(sources), others


def _read(beton: Beton, checksums: Checksums, sample: int) -> bytes:
    """The JPEG of a sample, whose checksum is compared first."""
    start = int(beton.offset[sample])
    data = beton.bytes[start : beton.stop[sample]].tobytes()
    try:
        if compute_checksums(beton, np.array([sample]), data, start)[0] != checksums.samples[sample]:
            raise ValueError(MISMATCH)
        stored = data[: beton.size[sample]]
        return unpack(stored) if beton.mode[sample] == COEFFICIENTS else stored
    except ValueError as error:
        raise InputError(damaged_sample(beton.path, sample, str(error))) from None


def _write(path: Path, data: bytes) -> None:
    if path.exists():
        if path.read_bytes() != data:
            raise InputError(f"{path}: is there already, with other bytes; name another folder")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, data)
