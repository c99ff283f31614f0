"""Any images in class folders: ROOT/{train,val,test}/CLASS/**/*.jpg."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from data_prep.samples import Dataset, PictureFiles
from pipeline.errors import InputError

SPLITS = ("train", "val", "test")
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


def read(origin: Path) -> Dataset:
    """The splits in `origin`. Labels are the class folders of all splits, sorted; samples go by class and path.

    Raises `InputError` if there is no split, a split has no class folder, or a class folder no image.
    """
    places = split_folders(origin)
    if not places:
        raise InputError(f"{origin}: holds none of the folders train, val and test (each with one folder per class)")
    return read_splits(origin, places, classes=None)


def split_folders(origin: Path) -> dict[str, str]:
    """The splits that are folders in `origin`, each with its path relative to it."""
    return {split: split for split in SPLITS if (origin / split).is_dir()}


def read_splits(origin: Path, places: Mapping[str, str], classes: Sequence[str] | None) -> Dataset:
    """The splits at these paths relative to `origin`. Labels are the order of `classes` (None: of all folders)."""
    folders = {split: class_folders(origin / place) for split, place in places.items()}
    order = tuple(classes) if classes is not None else tuple(sorted(set().union(*folders.values())))
    label = {name: index for index, name in enumerate(order)}
    splits = {split: _images(origin, places[split], names, label) for split, names in folders.items()}
    return Dataset(order, splits)


def class_folders(folder: Path) -> list[str]:
    """The names of the class folders of one split, sorted. Raises `InputError` if there are none."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})") from None
    if not names:
        raise InputError(f"{folder}: holds no class folders")
    return names


def _images(origin: Path, place: str, classes: Sequence[str], label: dict[str, int]) -> PictureFiles:
    names: list[str] = []
    labels: list[int] = []
    for name in classes:
        prefix = f"{place}/{name}".removeprefix("./")
        files = sorted(_walk(f"{origin}/{prefix}", prefix))
        if not files:
            raise InputError(f"{origin / prefix}: holds no images ({', '.join(SUFFIXES)})")
        names += files
        labels += [label[name]] * len(files)
    return PictureFiles(origin, names, labels)


def _walk(folder: str, prefix: str) -> Iterator[str]:
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})") from None
    for entry in entries:
        name = f"{prefix}/{entry.name}"
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _walk(entry.path, name)
        elif entry.name.lower().endswith(SUFFIXES):
            yield name
