"""Listed samples -> the files of a prepared folder, in one that `prep_dir` holds."""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from widemix.data_prep.beton_writer import BetonWriter, Written
from widemix.data_prep.encoding import Encoding
from widemix.data_prep.prep_dir import UNFINISHED, rename_finished
from widemix.data_prep.samples import IN_MEMORY, Dataset, Status
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError, RunError
from widemix.files import atomic_write
from widemix.formats import checksums, sources
from widemix.formats.checksums import crc32c
from widemix.formats.chunks import hash_bytes
from widemix.formats.manifest import Manifest, Split, count_labels
from widemix.progress_line import print_status, track

LISTED = 20  # images that are left out, in the list before an error
ADVICE = "repair, convert or remove them, then give the command with --force; or leave out more with --max-bad"
NAMED = 3  # samples in a message


class Job(NamedTuple):
    """A dataset to be written, and where."""

    plan: dict[str, Any]  # all that the output depends on, as `prep_dir` records it
    to: Path
    settings: PrepSettings
    dataset: Dataset
    encoding: Encoding
    max_bad: float  # fraction of a split's images that may be left out
    force: bool  # whether to start again where a source has changed since an interrupted preparation


def write_dataset(job: Job) -> Manifest:
    """Write all splits, their checksums and the manifest; returns it. Raises what `prepare` raises."""
    splits: dict[str, Split] = {}
    exceptions = [*job.dataset.exceptions, *job.dataset.check_files()]
    files = dict(job.encoding.files)
    for name in job.dataset.splits:
        splits[name], more, tables = _write_split(name, job)
        exceptions += more
        files |= tables
    for name, data in files.items():
        atomic_write(job.to / f"{name}{UNFINISHED}", data)
    manifest = Manifest(
        source=job.plan["source"],
        origin=job.plan["from"],
        classes=job.dataset.classes,
        splits=splits,
        settings=job.settings.as_json(),
        versions=job.plan["versions"],
        exceptions=tuple(exceptions),
        files={name: hash_bytes(data) for name, data in files.items()},
    )
    rename_finished(job.to, manifest)
    if not job.settings.part:  # which may hold few images of a class
        print_untrained(job.to, manifest, job.encoding.unit)
    return manifest


def print_untrained(to: Path, manifest: Manifest, unit: str = "images") -> None:
    """Print a line for each split with classes of which train has nothing, so that no network can learn them."""
    train = manifest.splits.get("train")
    if train is None:
        return
    for name, split in manifest.splits.items():
        counts = zip(manifest.classes, train.per_class, split.per_class, strict=True)
        lacking = [label for label, of_train, count in counts if count and not of_train]
        if lacking:
            what = f"train has no {unit} of {name_some(lacking)}"
            print_status(f"warning: {to}: {what}, which {name} has")


def _write_split(name: str, job: Job) -> tuple[Split, list[dict[str, str]], dict[str, bytes]]:
    """Write one split's .beton; returns its manifest entry, its exceptions, and the files of its checksums."""
    samples, encoding = job.dataset.splits[name], job.encoding
    with _open_writer(name, job) as writer:
        written = writer.written
        with (
            closing(encoding.records(samples, written.taken)) as records,
            closing(track(records, name, len(samples), encoding.unit, written.taken)) as counted,
        ):
            for record in counted:
                writer.add(record)
                check_fraction(name, written, len(samples), job.max_bad, finished=False)
        check_fraction(name, written, len(samples), job.max_bad, finished=True)
        if not written.count:
            raise InputError(f"{job.plan['from']}: not one image of {name} can be stored")
        if not job.settings.part:  # which may hold few images of a class
            check_classes(name, written, samples, job.dataset.classes, job.max_bad)
        blocks = writer.finish()
    split = Split(
        file=f"{name}.beton",
        bytes=writer.path.stat().st_size,
        samples=written.count,
        per_class=count_labels(writer.labels, len(job.dataset.classes)),
        fields=encoding.layout.types,
        blocks=blocks,
    )
    stored = written.stored[: written.count]
    names = [samples[number].name for number in stored.tolist()]
    tables = {
        f"{name}{checksums.SUFFIX}": writer.checksum_file(),
        f"{name}{sources.SUFFIX}": sources.sources_text(written.origins["checksum"][stored].tolist(), names),
    }
    return split, written.exceptions, tables


def _open_writer(name: str, job: Job) -> BetonWriter:
    """A writer that resumes, if the samples that were taken before are still the same."""
    samples, journal = job.dataset.splits[name], job.to / f"{name}.journal{UNFINISHED}"

    def open_writer() -> BetonWriter:
        path, seed = job.to / f"{name}.beton{UNFINISHED}", f"{name} {json.dumps(job.plan)}"
        layout, page = job.encoding.layout, job.settings.page
        return BetonWriter(path, journal, len(samples), layout, page=page, seed=seed)

    writer = open_writer()
    try:
        check_unchanged(samples, writer.written.origins[: writer.written.taken], job.to)
    except InputError:
        writer.disk.close()
        if not job.force:
            raise
        journal.unlink()
        return open_writer()
    return writer


def check_fraction(split: str, written: Written, samples: int, max_bad: float, *, finished: bool) -> None:
    """Raise `RunError`, after a list of them, if more than the fraction `max_bad` of the samples are left out.

    Before the split is `finished`, only if they fill the list, so that it names as many as are to be repaired.
    """
    bad = written.taken - written.count
    if bad > max_bad * samples and (finished or bad >= LISTED):
        _print_left_out(written)
        so_far = "" if written.taken == samples else f" of the first {written.taken}"
        fraction = f"more than {100 * max_bad:.3g} % of {samples}"
        raise RunError(f"{split}: {bad} images{so_far} are left out, {fraction}; {ADVICE}")


def check_classes(
    split: str, written: Written, samples: Sequence[Any], classes: Sequence[str], max_bad: float
) -> None:
    """Raise `RunError`, after a list, if all images of a class are left out, unless all may be."""
    out = np.setdiff1d(np.arange(written.taken), written.stored[: written.count])
    if not len(out) or max_bad >= 1:
        return
    kept = {samples[number].label for number in written.stored[: written.count].tolist()}
    lost = sorted({samples[number].label for number in out.tolist()} - kept)
    if lost:
        _print_left_out(written)
        names = ", ".join(classes[label] for label in lost)
        raise RunError(f"{split}: not one image of {names} can be stored; {ADVICE} 100%")


def _print_left_out(written: Written) -> None:
    lines = [
        f"{entry['file']}: {entry['rule']}" for entry in written.exceptions if entry["rule"].startswith("left out")
    ]
    for line in lines[:LISTED]:
        print_status(line)
    if len(lines) > LISTED:
        print_status(f"... and {len(lines) - LISTED} more")


def check_unchanged(samples: Sequence[Any], origins: np.ndarray, to: Path) -> None:
    """Raise `InputError` with the samples whose source has changed since `origins`, ORIGIN [taken], were written.

    A file of another size has changed. One of another time is read again, and has changed if its checksum has. So are
    samples that are read with their listing.
    """
    taken = (samples[number] for number in range(len(origins)))
    changed = [sample.name for sample, origin in zip(taken, origins, strict=True) if _has_changed(sample, origin)]
    if changed:
        raise InputError(
            f"{name_some(changed)}: changed since the interrupted preparation in {to}; restore what was there, "
            "or add --force to start again"
        )


def name_some(names: Sequence[str]) -> str:
    """The first names, and how many there are in all if there are more."""
    return ", ".join(names[:NAMED]) + (f", ... ({len(names):,} in all)" if len(names) > NAMED else "")


def _has_changed(sample: Any, origin: np.void) -> bool:
    then, now = Status(*origin.tolist()[1:]), sample.status()
    if now == then and now != IN_MEMORY:
        return False
    return now.size != then.size or crc32c(sample.content()) != origin["checksum"]
