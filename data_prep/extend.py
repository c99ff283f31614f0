"""What a source has gained since it was prepared, and the samples that need not be encoded again to add it."""

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.changes import name_some
from data_prep.encoding import Encoding
from data_prep.picture import Encoded
from data_prep.samples import Dataset, Origin
from data_prep.subset import Subset
from pipeline.errors import InputError
from pipeline.formats.beton import Beton, open_beton
from pipeline.formats.checksums import compute_checksums, crc32c, open_checksums
from pipeline.formats.manifest import Manifest
from pipeline.formats.sources import SUFFIX, read_sources


def find_new(to: Path, manifest: Manifest, dataset: Dataset) -> list[str]:
    """The names of the samples in the source that were not there when the folder `to` was prepared.

    Raises `InputError` if some that were there are gone. Nothing is known of folders without names of samples.
    """
    if any(Path(split.file).with_suffix(SUFFIX).name not in manifest.files for split in manifest.splits.values()):
        return []
    prepared = {name for split in manifest.splits.values() for name in read_sources(to / split.file)}
    left_out = {entry["file"] for entry in manifest.exceptions if entry["rule"].startswith("left out")}
    listed = [sample.name for samples in dataset.splits.values() for sample in samples]
    gone = sorted(prepared - set(listed))
    if gone:
        raise InputError(
            f"{to}: holds {name_some(gone)}, no longer in {manifest.origin}; add --force to prepare what is there now"
        )
    return sorted(name for name in listed if name not in prepared and name not in left_out)


class Prepared:
    """The pictures of a prepared folder, by name."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.rules = {entry["file"]: entry["rule"] for entry in manifest.exceptions}
        self.places: dict[str, tuple[Beton, int, int]] = {}  # the file, the number in it, and the source's checksum
        for split in manifest.splits.values():
            beton = open_beton(folder / split.file)
            for name, (number, checksum) in read_sources(beton.path).items():
                self.places[name] = (beton, number, checksum)
        self.checksums = {beton.path: open_checksums(beton).samples for beton, _, _ in self.places.values()}

    def records(self, samples: Sequence[Any], start: int, encoding: Encoding) -> Generator[Encoded]:
        """The samples from number `start` on: those that are prepared as they are, the others encoded."""
        new = [number for number in range(start, len(samples)) if samples[number].name not in self.places]
        encoded = encoding.records(Subset(samples, new), 0)
        try:
            for number in range(start, len(samples)):
                sample = samples[number]
                yield self._read(sample) if sample.name in self.places else next(encoded)
        finally:
            encoded.close()

    def _read(self, sample: Any) -> Encoded:
        beton, number, source = self.places[sample.name]
        status = sample.status()
        if crc32c(sample.content()) != source:
            raise InputError(
                f"{sample.name}: changed since it was prepared; add --force to prepare all of what is there now"
            )
        start, table = int(beton.offset[number]), int(beton.segments[number])
        data = beton.bytes[start : beton.stop[number]].tobytes()
        if compute_checksums(beton, np.array([number]), data, start)[0] != self.checksums[beton.path][number]:
            raise InputError(f"{beton.path}: sample {number} is damaged; add --force to prepare all again")
        record = Encoded(
            sample.name,
            sample.label,
            int(beton.mode[number]),
            int(beton.width[number]),
            int(beton.height[number]),
            data[: beton.size[number]],
            self.rules.get(sample.name, ""),
            data[table - start :] if beton.segments_size[number] else b"",
            origin=Origin(source, status),
        )
        return record.with_checksum()
