"""A source on disk -> a folder of one .beton per split and a manifest; an interrupted preparation is resumed."""

import hashlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from widemix.cgroups import usable_cpus
from widemix.data_prep.beton_writer import expected_bytes
from widemix.data_prep.encoding import Encoding, encoding_for
from widemix.data_prep.extend import Prepared, find_changes
from widemix.data_prep.prep_dir import (
    check_outside,
    check_target,
    clear_leftovers,
    leftovers,
    prep_dir,
    translate_errors,
)
from widemix.data_prep.samples import Dataset
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources import check_origin, read_source
from widemix.data_prep.sources.from_python import SOURCE
from widemix.data_prep.subset import Subset, shuffle_train, take_subset
from widemix.data_prep.write_dataset import Job, write_dataset
from widemix.errors import InputError
from widemix.formats.chunks import hash_bytes
from widemix.formats.manifest import NAME, Manifest, read_manifest, split_path
from widemix.progress_line import print_status

PACKAGES = ("widemix", "numpy", "pillow")
MAX_ENCODED = 64  # images of a split that are encoded for the estimate
DISK_BYTES_PER_S = 500e6  # assumed speed of writing and flushing: nothing is written to measure it


@translate_errors()
def prepare(
    source: str | Dataset,
    origin: Path | None,
    to: Path,
    settings: PrepSettings,
    *,
    processes: int | None = None,
    force: bool = False,
    max_bad: float = 0.01,
    extend: bool = False,
) -> Manifest:
    """Prepare `source`, read from `origin`, in the folder `to`; returns its manifest.

    source: the name of one in `sources`, or what `from_python.collect` gives, with no `origin`.

    If the folder already holds the same preparation, it is left unchanged; with `force` it is prepared again. If it
    holds anything else, `InputError` is raised, unless `force`; if the source has grown or its classes have changed
    since, unless `extend`: the result is that of preparing what is there now, but only new images are encoded. Images
    are encoded by `processes` processes, by default one per usable CPU.

    Raises `InputError` for what the user can correct (paths, images, a full disk), and `RunError` if a process is
    killed, or if more than the fraction `max_bad` of a split's images, or all of a class, cannot be decoded. After an
    error, Ctrl-C or a kill either the folder is as it was before, or the same call resumes.
    """
    name, origin, done, dataset = _list(source, origin, to, settings, force, extend)
    if done is not None and not is_outdated(to, done, dataset, extend):
        clear_leftovers(to)
        print_status(f"{to}: already prepared from {done.origin} with these settings")
        return done
    encoding = encoding_for(dataset, origin, settings, processes)
    plan = plan_of(name, origin, settings, dataset, encoding)
    if done is not None and not dataset.text and done.versions == plan["versions"]:
        encoding = encoding._replace(records=partial(Prepared({to: done}).records, encoding=encoding))
    with prep_dir(to, plan, force):
        return write_dataset(Job(plan, to, settings, dataset, encoding, max_bad, force))


def _list(
    source: str | Dataset, origin: Path | None, to: Path, settings: PrepSettings, force: bool, extend: bool
) -> tuple[str, Path | None, Manifest | None, Dataset]:
    """The source's name and path, the manifest of `to` if it holds this preparation, and the samples to prepare."""
    name = source if isinstance(source, str) else SOURCE
    origin = check_origin(source, origin) if isinstance(source, str) else origin
    check_outside(to, origin)
    done = find_prepared(name, origin, to, settings, force, extend)
    dataset = read_source(source, origin, settings) if isinstance(source, str) else source
    return name, origin, done, select(dataset, settings)


def is_outdated(to: Path, done: Manifest, dataset: Dataset, extend: bool) -> bool:
    """Whether the source has other samples or classes than the prepared folder; `InputError` unless `extend`."""
    changes = find_changes(to, done, dataset)
    if changes and not extend:
        raise InputError(
            f"{to}: was prepared from {done.origin} before {' and '.join(changes)}; add --extend to prepare what "
            "is there now (only new images are encoded)"
        )
    return bool(changes)


def select(dataset: Dataset, settings: PrepSettings) -> Dataset:
    """The splits, the subset of train, the order and the part of `settings`; `InputError` if they are not there."""
    chosen = settings.splits.split(",") if settings.splits else list(dataset.splits)
    unknown = [split for split in chosen if split not in dataset.splits]
    if unknown:
        raise InputError(f"splits: the source has no {unknown[0]!r}; it has {', '.join(dataset.splits)}")
    kept = {split: samples for split, samples in dataset.splits.items() if split in chosen}
    whole = shuffle_train(take_subset(replace(dataset, splits=kept), settings), settings)
    return take_part(whole, settings) if settings.part else whole


def take_part(dataset: Dataset, settings: PrepSettings) -> Dataset:
    """One of the parts of about the same size in which several machines prepare a dataset, in the order of samples.

    Raises `InputError` for sentence pairs, and for a split that has fewer samples than there are parts.
    """
    if dataset.text:
        raise InputError("part: sentence pairs are prepared by one machine; leave it out")
    number, count = settings.part_of
    parts = {}
    for split, samples in dataset.splits.items():
        first, stop = (len(samples) * end // count for end in (number - 1, number))
        if len(samples) < count:
            raise InputError(f"part {settings.part}: {split} has {len(samples)} samples; use fewer parts")
        parts[split] = Subset(samples, range(first, stop))
    return replace(dataset, splits=parts, check_files=tuple)


def find_prepared(
    source: str, origin: Path | None, to: Path, settings: PrepSettings, force: bool, extend: bool
) -> Manifest | None:
    """The manifest if `to` already holds this preparation, None if it is to be written.

    Raises `InputError` if `to` must not be written to.
    """
    if to.exists() and not to.is_dir():
        raise InputError(f"{to}: is a file, not a folder to write to")
    if not (to / NAME).exists():
        check_target(to, force)
        if extend and not leftovers(to):
            raise InputError(f"{to}: holds no prepared data to extend; name another folder, or leave out --extend")
        return None
    if force:
        return None
    try:
        manifest = read_manifest(to)
        for name in manifest.splits:
            split_path(to, name, manifest)
    except InputError as error:
        raise InputError(f"{error}, with --force") from None
    defaults = PrepSettings().as_json()  # for keys that the version which wrote the manifest did not have
    earlier = {"source": manifest.source, "from": manifest.origin, **defaults, **manifest.settings}
    wanted = {"source": source, "from": str(origin or source), **settings.as_json()}
    differing = [name for name in wanted if earlier.get(name) != wanted[name]]
    if not differing:
        return manifest
    name = differing[0]
    raise InputError(
        f"{to}: was prepared with {name} {earlier.get(name)}, not {wanted[name]}; "
        "name another folder, or add --force to replace it"
    )


def plan_of(
    source: str, origin: Path | None, settings: PrepSettings, dataset: Dataset, encoding: Encoding
) -> dict[str, Any]:
    """All that the output depends on except the images' content: equal if one process may resume another's work."""
    listing = {}
    for name, samples in dataset.splits.items():
        names = hashlib.blake2b(digest_size=16)
        for sample in samples:
            names.update(f"{sample.name}\0{sample.label}\n".encode("utf-8", "surrogateescape"))
            if dataset.targets:
                names.update(sample.targets)
        listing[name] = [len(samples), names.hexdigest()]
    return {
        "source": source,
        "from": str(origin or source),
        **settings.as_json(),
        "versions": _versions(encoding),
        "files": {name: hash_bytes(data) for name, data in encoding.files.items()},
        "listing": listing,
    }


def _versions(encoding: Encoding) -> dict[str, str]:
    return {**{name: version(name) for name in PACKAGES}, **encoding.versions}


class Estimate(NamedTuple):
    """The expected output for one split."""

    split: str
    samples: int
    bytes: int
    seconds: float  # to encode with all processes, and to write


@translate_errors()
def dry_run(
    source: str,
    origin: Path | None,
    to: Path,
    settings: PrepSettings,
    *,
    processes: int | None = None,
    force: bool = False,
    extend: bool = False,
) -> tuple[list[Estimate], int]:
    """Estimate what `prepare` with the same arguments would write; returns the free bytes on that disk too.

    Nothing is written.

    The list is empty if the folder is already prepared. Raises the `InputError` that `prepare` would raise before it
    encodes.
    """
    _, origin, done, dataset = _list(source, origin, to, settings, force, extend)
    existing = next(folder for folder in (to.absolute(), *to.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if done is not None and not is_outdated(to, done, dataset, extend):
        return [], free
    encoding = encoding_for(dataset, origin, settings, processes=1)  # more would mostly measure their start
    workers = (processes or usable_cpus()) if encoding.parallel else 1
    return [
        _estimate(name, samples, encoding, workers, settings.page) for name, samples in dataset.splits.items()
    ], free


def _estimate(name: str, samples: Sequence[Any], encoding: Encoding, workers: int, page: int) -> Estimate:
    chosen = range(0, len(samples), max(1, len(samples) // MAX_ENCODED))[:MAX_ENCODED]
    started = time.perf_counter()
    size = sum(len(part) for record in encoding.records(Subset(samples, chosen), 0) for part in record.parts)
    scale = len(samples) / len(chosen)
    seconds = (time.perf_counter() - started) * scale / workers
    written = expected_bytes(len(samples), size * scale, encoding.layout, page)
    return Estimate(name, len(samples), written, seconds + written / DISK_BYTES_PER_S)
