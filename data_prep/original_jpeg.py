"""The image files of a prepared folder, written again: of coefficients byte for byte those that were prepared."""

import errno
import os
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from widemix.data_prep.jpeg import unpack
from widemix.data_prep.prep_dir import UNFINISHED, check_outside, lock_folder, translate_errors
from widemix.errors import InputError
from widemix.formats import coefficients
from widemix.formats.beton import COEFFICIENTS, JPEG, RAW, Beton, open_beton
from widemix.formats.checksums import MISMATCH, Checksums, compute_checksums, crc32c, open_checksums
from widemix.formats.manifest import read_manifest, split_path
from widemix.formats.sources import SUFFIX, damaged_sample, read_sources
from widemix.progress_line import track

SAMPLED = 10_000  # images of which the sizes are read
JPEG_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif")
Sources = dict[str, tuple[int, int]]  # number and source's CRC-32C of each sample, by name


class _Split(NamedTuple):
    beton: Beton
    checksums: Checksums
    places: Sources  # by the files' paths below the folder


@translate_errors()
def restore(prepared: Path, to: Path) -> dict[str, tuple[int, int]]:
    """Write the files of a prepared folder, or of one of its .beton files, below `to`, by the samples' names.

    Returns for each split how many files there are, and how many of them are not the bytes that were prepared, since
    prep has changed the image: their names end as a JPEG's. A file that is there already with these bytes stays, so
    the same call resumes one that was killed.

    Raises `InputError` for pixels and for other files in the way; and for damaged samples, after all other files have
    been written.
    """
    folder, paths = prepared, []
    if prepared.is_dir():
        manifest = read_manifest(prepared)
        paths = [split_path(prepared, name, manifest) for name in manifest.splits]
    else:
        folder, paths = prepared.parent, [prepared]
    betons = [open_beton(path) for path in paths]
    check_outside(to, folder.resolve())
    splits = [_open(beton) for beton in betons]
    failed: list[str] = []
    with lock_folder(to):
        counts = {split.beton.path.stem: _restore(split, to, failed) for split in splits}
    os.sync()  # once, since a flush of each file takes several times as long as all else
    if failed:
        total = sum(count for count, _ in counts.values())
        raise InputError(f"{len(failed)} of {total} files cannot be restored; the first: {failed[0]}")
    return counts


def _open(beton: Beton) -> _Split:
    path = beton.path
    if (beton.mode == RAW).any():
        raise InputError(f"{path}: holds pixels, of which no file can be restored")
    checksums, sources = open_checksums(beton), read_sources(path)
    if 1 + max((sample for sample, _ in sources.values()), default=-1) != len(beton):  # a name may be there twice
        raise InputError(f"{path.with_suffix(SUFFIX)}: is of another file; prepare the folder again")
    return _Split(beton, checksums, _places(path, sources))


def _restore(split: _Split, to: Path, failed: list[str]) -> tuple[int, int]:
    """Restore a split; messages about what cannot be go to `failed`."""
    path, places = split.beton.path, split.places
    others = 0
    with closing(track(places.items(), path.stem, len(places), "files")) as counted:
        for place, (sample, source) in counted:
            try:
                data = _read(split.beton, split.checksums, sample)
            except ValueError as error:
                failed.append(damaged_sample(path, sample, str(error)))
                continue
            changed = crc32c(data) != source
            others += changed
            try:
                _write(to / (_jpeg_place(place, places) if changed else place), data)
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                failed.append(f"{error.filename}: {error.strerror}")
    return len(places), others


def _places(beton: Path, sources: Sources) -> Sources:
    """The samples by their paths within the folder, whatever their names: absolute, with `..`."""
    places: Sources = {}
    for name, source in sources.items():
        place = os.path.normpath(f"/{name.lstrip('/')}")[1:]
        if not place or "\0" in place:
            raise InputError(f"{beton.with_suffix(SUFFIX)}: is damaged; prepare the folder again")
        if places.setdefault(place, source)[1] != source[1]:
            raise InputError(f"{beton}: two samples would be the file {place}")
    return places


def _jpeg_place(place: str, taken: Sources) -> str:
    """The path of an image that prep has made a JPEG, which no other sample has."""
    if place.lower().endswith(JPEG_SUFFIXES):
        return place
    while place in taken:
        place += ".jpg"
    return place


def _read(beton: Beton, checksums: Checksums, sample: int) -> bytes:
    """The JPEG of a sample. Raises `ValueError` if it is damaged."""
    start = int(beton.offset[sample])
    data = beton.bytes[start : beton.stop[sample]].tobytes()
    if compute_checksums(beton, np.array([sample]), data, start)[0] != checksums.samples[sample]:
        raise ValueError(MISMATCH)
    stored = data[: beton.size[sample]]
    return unpack(stored) if beton.mode[sample] == COEFFICIENTS else stored


def _write(path: Path, data: bytes) -> None:
    if path.exists():
        if path.read_bytes() != data:
            raise InputError(f"{path}: is there already, with other bytes; name another folder")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"file{UNFINISHED}")
    temporary.write_bytes(data)
    temporary.replace(path)


def count_bytes(path: Path) -> tuple[int, int, int, int]:
    """Of a .beton: images that are coefficients and that are JPEGs; the bytes of the former, and of their JPEGs.

    These are from some of them.
    """
    beton = open_beton(path)
    packed = np.flatnonzero(beton.mode == COEFFICIENTS)
    chosen = packed[:: -(-len(packed) // SAMPLED) or 1]
    before = [
        coefficients.jpeg_size(beton.bytes[start : start + coefficients.HEAD.size].tobytes())
        for start in beton.offset[chosen]
    ]
    stored = int(beton.size[packed].sum())
    share = stored / max(int(beton.size[chosen].sum()), 1)
    return len(packed), int((beton.mode == JPEG).sum()), stored, round(sum(before) * share)
