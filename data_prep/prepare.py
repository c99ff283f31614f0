"""From a source on disk to a folder of .beton files with a manifest: whole, or to be gone on with."""

import difflib
import hashlib
import importlib
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.encoding import Encoding, encoding_for
from data_prep.progress import progress, say
from data_prep.samples import Dataset
from data_prep.settings import PrepSettings
from data_prep.subset import take_subset
from data_prep.workplace import UNFINISHED, data_path, journal_path, permitted, publish, tidy, workplace
from data_prep.write import BetonWriter
from pipeline.errors import InputError
from pipeline.files import atomic_write
from pipeline.formats.blocks import hash_blocks, hash_bytes
from pipeline.formats.manifest import NAME, Manifest, Split, count_labels, read_manifest, split_path
from pipeline.formats.text import TOKENIZER


class Source(NamedTuple):
    """Where the pictures come from. The function `reader` of `data_prep` lists them: origin -> Dataset."""

    reader: str  # "module.function", imported when it is called
    description: str
    takes_origin: bool = True


SOURCES = {
    "digits": Source("digits.read", "scikit-learn's 1,797 handwritten digits, 8 x 8 pixels; needs no --from", False),
    "image-folder": Source(
        "image_folder.read", "any pictures in class folders: DIR/{train,val,test}/CLASS/*.jpg, *.png, ..."
    ),
    "imagenet": Source(
        "imagenet.read",
        "ImageNet: DIR/{train,val}/<wnid>/*.JPEG, DIR/<wnid>/*.JPEG, or the official tars and devkit",
    ),
    "cifar10": Source("cifar.cifar10", "CIFAR-10, python or binary version, tar.gz or unpacked"),
    "cifar100": Source(
        "cifar.cifar100", "CIFAR-100 with its fine labels, python or binary version, tar.gz or unpacked"
    ),
    "mnist": Source("mnist.read", "MNIST in its four idx files, .gz or unpacked"),
    "svhn": Source(
        "svhn.read", "SVHN cropped digits: train_32x32.mat, test_32x32.mat, extra_32x32.mat, those there are"
    ),
    "stl10": Source("stl10.read", "STL-10 in its binary files, unpacked: train, test, folds and unlabelled"),
    "mnli": Source("pairs.mnli", "MultiNLI sentence pairs: .jsonl or .tsv, WordPiece by DIR/vocab.txt or learnt"),
    "snli": Source("pairs.snli", "SNLI sentence pairs: .jsonl, .txt or .tsv, WordPiece by DIR/vocab.txt or learnt"),
}
PACKAGES = ("widemix", "numpy", "pillow")


@permitted()
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

    A folder that holds just this already is left alone; one that holds anything else is an `InputError`, unless
    `force`. `processes` encode pictures, by default as many as there are usable CPUs. Raises `InputError` for what
    the user can mend (paths, pictures, a full disk) and `RuntimeError` when a process is killed. Either way, and
    after Ctrl-C or a kill, the folder is as it was, or the same call goes on where this one stopped.
    """
    origin = checked_origin(source, origin)
    done = already_there(source, origin, to, settings, force)
    if done is not None:
        tidy(to)
        say(f"{to}: already prepared from {done.origin} with these settings")
        return done
    dataset = list_samples(source, origin, settings)
    encoding = encoding_for(dataset, origin, settings, processes)
    with workplace(to, _plan(source, origin, settings, dataset, encoding), force):
        return _write(source, origin, to, settings, dataset, encoding)


def _source(name: str) -> Source:
    if name in SOURCES:
        return SOURCES[name]
    close = difflib.get_close_matches(name, SOURCES, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(SOURCES)}"
    raise InputError(f"no source {name!r}; {hint}")


def checked_origin(name: str, origin: Path | None) -> Path | None:
    """Where to read the source from, as an absolute path; `InputError` for an unknown source or a wrong path."""
    source = _source(name)
    if not source.takes_origin:
        if origin is not None:
            raise InputError(f"{name} is not read from a folder; leave out --from {origin}")
        return None
    if origin is None:
        raise InputError(f"{name} needs --from: {source.description}")
    if not origin.exists():
        raise InputError(f"{origin}: no such file or folder to read {name} from")
    return origin.resolve()


def list_samples(name: str, origin: Path | None, settings: PrepSettings) -> Dataset:
    """The classes and samples of a source at a checked origin, cut as the settings say; no picture is read yet."""
    module, function = SOURCES[name].reader.split(".")
    return take_subset(getattr(importlib.import_module(f"data_prep.{module}"), function)(origin), settings)


def already_there(source: str, origin: Path | None, to: Path, settings: PrepSettings, force: bool) -> Manifest | None:
    """The manifest, if `to` holds just what is asked for; `InputError` if it must not be written to."""
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
        found = {"source": manifest.source, "from": manifest.origin, **PrepSettings().as_json(), **manifest.settings}
        for name in manifest.splits:
            split_path(to, name, manifest)
    except InputError as error:
        if force:
            return None
        raise InputError(f"{error}, with --force") from None
    wanted = {"source": source, "from": str(origin or source), **settings.as_json()}
    differing = [name for name in wanted if found.get(name) != wanted[name]]
    if not differing:
        return manifest
    if force:
        return None
    name = differing[0]
    raise InputError(
        f"{to}: was prepared with {name} {found.get(name)}, not {wanted[name]}; "
        "name another folder, or give --force to replace it"
    )


def _plan(
    source: str, origin: Path | None, settings: PrepSettings, dataset: Dataset, encoding: Encoding
) -> dict[str, Any]:
    """All that the bytes depend on, but for the pictures' own: equal where one process goes on from another."""
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
    for name, samples in dataset.splits.items():
        path = data_path(to, name)
        with (
            BetonWriter(path, journal_path(to, name), len(samples), encoding.layout) as writer,
            closing(encoding.records(samples, writer.taken)) as encoded,
            closing(progress(encoded, len(samples), name, encoding.unit, writer.taken)) as shown,
        ):
            for item in shown:
                writer.add(item)
            if not writer.count:
                raise InputError(f"{origin}: not one picture of {name} can be decoded")
            writer.finish()
        exceptions += writer.exceptions
        splits[name] = Split(
            file=f"{name}.beton",
            bytes=path.stat().st_size,
            samples=writer.count,
            per_class=count_labels(writer.labels, len(dataset.classes)),
            fields=encoding.layout.types,
            blocks=hash_blocks(path, writer.disk.hashes.known),
        )
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
    publish(to, manifest)
    return manifest
