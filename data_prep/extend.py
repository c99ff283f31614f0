"""Compare a source with what was prepared of it, and take prepared samples over without encoding them again."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from widemix.data_prep.encoding import Encoding
from widemix.data_prep.records import Encoded
from widemix.data_prep.samples import Dataset, Origin
from widemix.data_prep.subset import Subset
from widemix.data_prep.verify import open_prepared
from widemix.data_prep.write_dataset import name_some
from widemix.errors import InputError
from widemix.formats.beton import RAW, TARGET, Beton, open_beton
from widemix.formats.checksums import compute_checksums, crc32c, open_checksums
from widemix.formats.manifest import Manifest
from widemix.formats.sources import SUFFIX, read_names, read_sources


def find_changes(to: Path, manifest: Manifest, dataset: Dataset) -> list[str]:
    """Return a phrase for each change of the source since the folder `to` was prepared: new samples or other targets.

    Samples are compared by name, class and targets, not by content; with the setting `holdout`, train's with those of
    that split. Raises `InputError` if some are gone. Of folders without names only the classes are compared.
    """
    phrases = _changed_classes(manifest.classes, dataset.classes)
    if any(Path(split.file).with_suffix(SUFFIX).name not in manifest.files for split in manifest.splits.values()):
        return phrases
    whole = {"holdout": "train"} if manifest.settings.get("holdout") else {}  # which it takes depends on all of train
    then = _by_name(
        named for split in manifest.splits for named in _prepared(to, manifest, split, whole.get(split, split))
    )
    now = _by_name(named for split in dataset.splits for named in _listed(dataset, split, whole.get(split, split)))
    left_out = {entry["file"] for entry in manifest.exceptions if entry["rule"].startswith("left out")}
    new = sorted(now.keys() - then.keys() - left_out)
    gone = sorted(then.keys() - now.keys())
    if gone:
        others = f", which now has {name_some(new)}" if new else ""
        raise InputError(
            f"{to}: holds {name_some(gone)}, no longer in {manifest.origin}{others}; add --force to prepare what is "
            "there now"
        )
    moved = [name for name in sorted(then.keys() & now.keys()) if then[name] != now[name]]
    if moved:
        first = moved[0]
        phrases.append(f"{name_some(moved)} changed ({first}: {then[first]} became {now[first]})")
    if new:
        phrases.append(f"it had {name_some(new)}")
    return phrases


def _changed_classes(then: Sequence[str], now: Sequence[str]) -> list[str]:
    new, gone = sorted(set(now) - set(then)), sorted(set(then) - set(now))
    phrases = [f"it had the classes {name_some(new)}"] if new else []
    phrases += [f"it lost the classes {name_some(gone)}"] if gone else []
    if not phrases and tuple(then) != tuple(now):
        first = next(label for label, (a, b) in enumerate(zip(then, now, strict=True)) if a != b)
        phrases = [f"the order of its classes changed (class {first} was {then[first]}, and is {now[first]})"]
    return phrases


def _by_name(named: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the text of each name; of one that comes several times, as a table may list an image, all texts."""
    found: dict[str, str] = {}
    several: dict[str, list[str]] = {}
    for name, where in named:
        if name in found:
            several.setdefault(name, [found[name]]).append(where)
        else:
            found[name] = where
    return found | {name: ", ".join(sorted(places)) for name, places in several.items()}


def _prepared(to: Path, manifest: Manifest, split: str, whole: str) -> Iterator[tuple[str, str]]:
    """Name, and split `whole` with class or targets, of the samples of a prepared split."""
    beton = open_prepared(to, manifest, manifest.splits[split])
    places, targets = _places(whole, manifest.classes), np.zeros(0, TARGET)
    for number, name in enumerate(read_names(beton.path)):
        if isinstance(beton, Beton) and beton.target_count:
            start = int(beton.targets[number])
            targets = beton.bytes[start : start + beton.target_count * TARGET.itemsize].view(TARGET)
        yield name, _describe(places[beton.label[number]], targets)


def _listed(dataset: Dataset, split: str, whole: str) -> Iterator[tuple[str, str]]:
    """The same of the samples of a split of the source."""
    places = _places(whole, dataset.classes)
    for sample in dataset.splits[split]:
        targets = np.frombuffer(sample.targets, TARGET) if dataset.targets else np.zeros(0, TARGET)
        yield sample.name, _describe(places[sample.label], targets)


def _places(split: str, classes: Sequence[str]) -> list[str]:
    """Return the text for samples of a split by label; the last is that of those without one, -1."""
    return [*(f"{name} of {split}" for name in classes), split]


def _describe(place: str, targets: np.ndarray) -> str:
    """The place, after the targets in as many digits as tell them from all others."""
    return f"{', '.join(str(value).removesuffix('.0') for value in targets)} of {place}" if len(targets) else place


class Prepared:
    """The images of prepared folders, by name."""

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
