"""The sources that `widemix prep` reads: one entry of `SOURCES` each.

The help, the errors and the dry run of `widemix prep` use this table. Other packages add to it by `register_source`.
"""

import difflib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from widemix.arguments import Name, check_arguments
from widemix.data_prep.samples import Dataset
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources.image_folder import SPLIT_FOLDERS
from widemix.data_prep.sources.labels import check_names
from widemix.data_prep.sources.shards import split_of
from widemix.errors import InputError

Reader = Annotated[str, Field(pattern=r"^\w+(\.\w+)+$")]  # MODULE.FUNCTION


class Source(NamedTuple):
    """A dataset that can be prepared."""

    reader: str  # full dotted name of a function (origin: Path | None) -> Dataset; imported at its first use
    description: str  # one line
    takes_origin: bool = True  # whether it is read from --from; otherwise `reader` is called with None
    takes_targets: bool = False  # whether `reader` takes the setting `targets` too
    shards: bool = False  # whether paths of its files tell their splits, as in data_prep/sources/shards.py


SOURCES = {
    "digits": Source(
        "widemix.data_prep.sources.arrays.read_digits",
        "scikit-learn's 1,797 handwritten digits, 8 x 8 pixels; takes no --from",
        takes_origin=False,
    ),
    "image-folder": Source(
        "widemix.data_prep.sources.image_folder.read",
        "images in class folders: DIR/{train,val,test}/CLASS/*.jpg, *.png, ...",
    ),
    "imagenet": Source(
        "widemix.data_prep.sources.imagenet.read",
        "ImageNet: DIR/{train,val}/<wnid>/*.JPEG, DIR/<wnid>/*.JPEG, Kaggle's DIR/ILSVRC/Data/CLS-LOC, or the "
        "official tars and devkit; a flat val with its list",
    ),
    "webdataset": Source(
        "widemix.data_prep.sources.webdataset.read",
        "WebDataset shards: DIR/**/*.tar with KEY.jpg and KEY.cls (or KEY.json)",
        shards=True,
    ),
    "parquet": Source(
        "widemix.data_prep.sources.parquet.read",
        "Hugging Face's image datasets: DIR/**/*.parquet with the columns image {bytes, path} and label",
        shards=True,
    ),
    "csv": Source(
        "widemix.data_prep.sources.csv_list.read",
        "any images listed in a file LIST.csv or LIST.jsonl with the columns path, split, and label or labels, or "
        "numbers to predict (--targets)",
        takes_targets=True,
    ),
    "cifar10": Source(
        "widemix.data_prep.sources.cifar.cifar10", "CIFAR-10, python or binary version, .tar.gz or unpacked"
    ),
    "cifar100": Source(
        "widemix.data_prep.sources.cifar.cifar100",
        "CIFAR-100 with fine labels, python or binary version, .tar.gz or unpacked",
    ),
    "mnist": Source("widemix.data_prep.sources.arrays.read_mnist", "MNIST: the four idx files, .gz or unpacked"),
    "svhn": Source(
        "widemix.data_prep.sources.arrays.read_svhn",
        "SVHN cropped digits: any of train_32x32.mat, test_32x32.mat, extra_32x32.mat",
    ),
    "stl10": Source(
        "widemix.data_prep.sources.arrays.read_stl10",
        "STL-10: the binary files, unpacked; train, test, folds and unlabeled",
    ),
    "mnli": Source(
        "widemix.data_prep.sources.pairs.mnli", "MultiNLI sentence pairs: .jsonl, .txt or .tsv files, .gz or not"
    ),
    "snli": Source(
        "widemix.data_prep.sources.pairs.snli", "SNLI sentence pairs: .jsonl, .txt or .tsv files, .gz or not"
    ),
    "far-pairs": Source(
        "widemix.data_prep.sources.pairs.far_pairs",
        "25,000 generated sentence pairs whose class depends on words that are far apart; takes no --from",
        takes_origin=False,
    ),
}


@check_arguments
def register_source(name: Name, reader: Reader, description: str, *, takes_origin: bool = True) -> None:
    """Add a source of another package to `SOURCES`; see `Source`. Raises `InputError` if the name is taken."""
    if name in SOURCES:
        raise InputError(f"source {name!r} is already registered, with the reader {SOURCES[name].reader}")
    SOURCES[name] = Source(reader, description, takes_origin)


def check_origin(name: str, origin: Path | None) -> Path | None:
    """The absolute path to read a source from; raises `InputError` for an unknown source or a wrong path."""
    source = _find(name)
    if not source.takes_origin:
        if origin is not None:
            raise InputError(f"{name} is not read from a folder; leave out --from {origin}")
        return None
    if origin is None:
        raise InputError(f"{name} needs --from: {source.description}")
    if not origin.exists():
        raise InputError(f"{origin}: no such file or folder to read {name} from")
    return origin.resolve()


def read_source(name: str, origin: Path | None, settings: PrepSettings) -> Dataset:
    """The classes and samples of a source at a checked origin; images are not read yet.

    Raises `InputError` for targets that the source cannot have, and for a class that is named twice.
    """
    source = SOURCES[name]
    if settings.targets and not source.takes_targets:
        having = ", ".join(other for other, entry in SOURCES.items() if entry.takes_targets)
        raise InputError(f"targets {settings.targets!r}: {name} has no columns of numbers; only {having} has")
    module, _, function = source.reader.rpartition(".")
    arguments = (origin, settings.targets) if source.takes_targets else (origin,)
    dataset = getattr(importlib.import_module(module), function)(*arguments)
    check_names(origin or name, dataset.classes)
    if settings.vocab and not dataset.text:
        raise InputError(f"vocab {settings.vocab}: is for sentence pairs, and {name} has none; leave out --vocab")
    return dataset


def wanted_files(name: str, splits: str) -> Callable[[str], bool]:
    """Whether a file of a source, by its path, is read for these splits (separated by commas; empty: all).

    Known for shards alone: class folders number the classes of all splits. Raises `InputError` for other splits than
    shards have.
    """
    if not splits or not _find(name).shards:
        return lambda path: True
    chosen = splits.split(",")
    for split in chosen:
        if split not in SPLIT_FOLDERS:
            raise InputError(f"splits: {name} has no {split!r}; it has {', '.join(SPLIT_FOLDERS)}")
    return lambda path: split_of(path) in (None, *chosen)


def _find(name: str) -> Source:
    if name in SOURCES:
        return SOURCES[name]
    close = difflib.get_close_matches(name, SOURCES, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(SOURCES)}"
    raise InputError(f"no source {name!r}; {hint}")
