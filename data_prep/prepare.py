"""A source on disk -> a folder of one .beton per split and a manifest; an interrupted preparation is resumed."""

import hashlib
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from data_prep.encoding import Encoding, encoding_for
from data_prep.prep_dir import (
    UNFINISHED,
    clear_leftovers,
    data_path,
    journal_path,
    prep_dir,
    rename_finished,
    translate_errors,
)
from data_prep.progress import print_status, progress
from data_prep.samples import Dataset
from data_prep.settings import PrepSettings, rename_old_keys
from data_prep.sources import check_origin, read_source
from data_prep.subset import take_subset
from data_prep.write import BetonWriter
from pipeline.errors import InputError
from pipeline.files import atomic_write
from pipeline.formats.blocks import hash_blocks, hash_bytes
from pipeline.formats.manifest import NAME, Manifest, Split, count_labels, read_manifest, split_path
from pipeline.formats.text import TOKENIZER

PACKAGES = ("widemix", "numpy", "pillow")


@translate_errors()
def prepare(
    source: str,
    origin: Path | None,
    to: Path,
    settings: PrepSettings,
    *,
    processes: int | None = None,
    force: bool = False,
) -> Manifest:
    """Prepare `source`, read from `origin`, in the folder `to`; returns its manifest.

    If the folder already holds the same preparation, it is left unchanged. If it holds anything else, `InputError` is
    raised, unless `force`. Images are encoded by `processes` processes, by default one per usable CPU.

    Raises `InputError` for what the user can correct (paths, images, a full disk) and `RuntimeError` if a process is
    killed. After an error, Ctrl-C or a kill either the folder is as it was before, or the same call resumes.
    """
    origin = check_origin(source, origin)
    done = find_prepared(source, origin, to, settings, force)
    if done is not None:
        clear_leftovers(to)
        print_status(f"{to}: already prepared from {done.origin} with these settings")
        return done
    dataset = list_samples(source, origin, settings)
    encoding = encoding_for(dataset, origin, settings, processes)
    with prep_dir(to, _plan(source, origin, settings, dataset, encoding), force):
        return _write(source, origin, to, settings, dataset, encoding)


def list_samples(source: str, origin: Path | None, settings: PrepSettings) -> Dataset:
    """The samples of a source at a checked origin, reduced to the subset in `settings`; images are not read yet."""
    return take_subset(read_source(source, origin), settings)


def find_prepared(source: str, origin: Path | None, to: Path, settings: PrepSettings, force: bool) -> Manifest | None:
    """The manifest if `to` already holds this preparation, None if it is to be written.

    Raises `InputError` if `to` must not be written to. Folders that older versions prepared are recognised.
    """
    if to.exists() and not to.is_dir():
        raise InputError(f"{to}: is a file, not a folder to write to")
    if not (to / NAME).exists():
        entries = to.iterdir() if to.exists() else ()
        ours = (TOKENIZER, f".{NAME}")  # the latter if `atomic_write` was killed
        others = [path for path in entries if path.suffix not in (".beton", UNFINISHED) and path.name not in ours]
        if others:
            raise InputError(f"{to}: holds other files ({others[0].name}, ...); name a new or an empty folder")
        return None
    try:
        manifest = read_manifest(to)
        for name in manifest.splits:
            split_path(to, name, manifest)
    except InputError as error:
        if force:
            return None
        raise InputError(f"{error}, with --force") from None
    defaults = PrepSettings().as_json()  # for keys that the version which wrote the manifest did not have
    earlier = {"source": manifest.source, "from": manifest.origin, **defaults, **rename_old_keys(manifest.settings)}
    wanted = {"source": source, "from": str(origin or source), **settings.as_json()}
    differing = [name for name in wanted if earlier.get(name) != wanted[name]]
    if not differing:
        return manifest
    if force:
        return None
    name = differing[0]
    raise InputError(
        f"{to}: was prepared with {name} {earlier.get(name)}, not {wanted[name]}; "
        "name another folder, or add --force to replace it"
    )


def _plan(
    source: str, origin: Path | None, settings: PrepSettings, dataset: Dataset, encoding: Encoding
) -> dict[str, Any]:
    """All that the output depends on except the images' content: equal if one process may resume another's work."""
    listing = {}
    for name, samples in dataset.splits.items():
        names = hashlib.blake2b(digest_size=16)
        for sample in samples:
            names.update(f"{sample.name}\0{sample.label}\n".encode("utf-8", "surrogateescape"))
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


def _write(
    source: str, origin: Path | None, to: Path, settings: PrepSettings, dataset: Dataset, encoding: Encoding
) -> Manifest:
    splits: dict[str, Split] = {}
    exceptions = list(dataset.exceptions)
    for name in dataset.splits:
        splits[name], more = _write_split(name, origin, to, dataset, encoding)
        exceptions += more
    for name, data in encoding.files.items():
        atomic_write(to / f"{name}{UNFINISHED}", data)
    manifest = Manifest(
        source=source,
        origin=str(origin or source),
        classes=dataset.classes,
        splits=splits,
        settings=settings.as_json(),
        versions=_versions(encoding),
        exceptions=tuple(exceptions),
        files={name: hash_bytes(data) for name, data in encoding.files.items()},
    )
    rename_finished(to, manifest)
    return manifest


def _write_split(
    name: str, origin: Path | None, to: Path, dataset: Dataset, encoding: Encoding
) -> tuple[Split, list[dict[str, str]]]:
    """Write one split's .beton; returns its manifest entry and its exceptions."""
    path, samples = data_path(to, name), dataset.splits[name]
    with (
        BetonWriter(path, journal_path(to, name), len(samples), encoding.layout) as writer,
        closing(encoding.records(samples, writer.taken)) as records,
        closing(progress(records, len(samples), name, encoding.unit, writer.taken)) as counted,
    ):
        for record in counted:
            writer.add(record)
        if not writer.count:
            raise InputError(f"{origin}: not one image of {name} can be decoded")
        writer.finish()
    split = Split(
        file=f"{name}.beton",
        bytes=path.stat().st_size,
        samples=writer.count,
        per_class=count_labels(writer.labels, len(dataset.classes)),
        fields=encoding.layout.types,
        blocks=hash_blocks(path, writer.disk.hashes.known),
    )
    return split, writer.exceptions
