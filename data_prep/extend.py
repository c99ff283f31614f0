"""What a source has gained since it was prepared, and samples that are prepared already and not encoded again."""

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.changes import name_some
from data_prep.encoding import Encoding
from data_prep.picture import Encoded
from data_prep.samples import Dataset, Origin
from data_prep.subset import Subset
from pipeline.errors import InputError
from pipeline.formats.beton import RAW, Beton, open_beton
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
    """The pictures of prepared folders, by name."""

    def __init__(self, manifests: Mapping[Path, Manifest], *, all_parts: bool = False) -> None:
        """Of the folders that have these manifests.

        all_parts: whether the folders are all parts of one preparation, so that no source needs to be read again.
        """
        self.all_parts = all_parts
        self.rules = {entry["file"]: entry["rule"] for found in manifests.values() for entry in found.exceptions}
        self.places: dict[str, tuple[Beton, int, int]] = {}  # the file, the number in it, and the source's checksum
        betons = [
            open_beton(folder / split.file) for folder, found in manifests.items() for split in found.splits.values()
        ]
        for beton in betons:
            for name, (number, checksum) in read_sources(beton.path).items():
                self.places[name] = (beton, number, checksum)
        self.checksums = {beton.path: open_checksums(beton).samples for beton in betons}

    def records(self, samples: Sequence[Any], start: int, encoding: Encoding) -> Generator[Encoded]:
        """The samples from number `start` on: those that are prepared as they are, the others encoded."""
        others = () if self.all_parts else range(start, len(samples))
        new = [number for number in others if samples[number].name not in self.places]
        encoded = encoding.records(Subset(samples, new), 0)
        try:
            for number in range(start, len(samples)):
                sample = samples[number]
                if sample.name in self.places:
                    yield self._read(sample)
                else:
                    yield self._left_out(sample) if self.all_parts else next(encoded)
        finally:
            encoded.close()

    def _left_out(self, sample: Any) -> Encoded:
        """The record of a sample that no folder holds, because it could not be decoded."""
        rule = self.rules.get(sample.name, "")
        if not rule.startswith("left out"):
            raise InputError(f"{sample.name}: is in none of the parts; prepare them again from what is there now")
        return Encoded(sample.name, sample.label, RAW, 0, 0, b"", rule, origin=Origin(0, sample.status()))

    def _read(self, sample: Any) -> Encoded:
        beton, number, source = self.places[sample.name]
        status = sample.status()
        if not self.all_parts and crc32c(sample.content()) != source:
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
            data[table - start :][: beton.segments_size[number]] if beton.segments_size[number] else b"",
            origin=Origin(source, status),
            targets=sample.targets,
        )
        return record.with_checksum()
