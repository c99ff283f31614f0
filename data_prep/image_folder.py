"""Any images in class folders: ROOT/{train,val,test}/CLASS/**/*.jpg; val may also be named validation or valid."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from data_prep.samples import Dataset, PictureFiles
from pipeline.errors import InputError

SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "validation", "valid"), "test": ("test",)}
SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".jfif",
    ".jpe",
    ".png",
    ".bmp",
    ".gif",
    ".webp",
    ".avif",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
)


def read(origin: Path) -> Dataset:
    """The splits in `origin`. Labels are the class folders of all splits, sorted; samples go by class and path.

    Raises `InputError` if there is no split, a split has no class folder, or a class folder no image.
    """
    places = split_folders(origin)
    if not places:
        raise InputError(f"{origin}: holds none of the folders train, val and test{_cure(origin)}")
    return read_splits(origin, places, classes=None)


def _cure(origin: Path) -> str:
    """What to do with a folder that holds pictures in another layout."""
    if any(path.suffix.lower() in SUFFIXES for path in origin.glob("*/*")):
        return f"; move its class folders into {origin / 'train'}, and --holdout 10% takes a split to evaluate on"
    if any(path.suffix.lower() in SUFFIXES for path in origin.glob("*")):
        return f", but pictures without classes; put them into folders {origin / 'train'}/CLASS"
    return " (each with one folder per class)"


def split_folders(origin: Path) -> dict[str, str]:
    """The splits that are folders in `origin`, each with its path relative to it; `InputError` if one has two."""
    found = {split: [name for name in names if (origin / name).is_dir()] for split, names in SPLIT_FOLDERS.items()}
    for names in found.values():
        if len(names) > 1:
            raise InputError(f"{origin}: holds both {names[0]} and {names[1]}; keep one of them")
    return {split: names[0] for split, names in found.items() if names}


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
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_dir())
    except OSError as error:
        raise InputError(f"{error.filename or folder}: cannot be read ({error.strerror})") from None
    if not names:
        raise InputError(f"{folder}: holds no class folders; put its images into one folder for each class")
    return names


def _images(origin: Path, place: str, classes: Sequence[str], label: dict[str, int]) -> PictureFiles:
    names: list[str] = []
    labels: list[int] = []
    for name in classes:
        prefix = f"{place}/{name}".removeprefix("./")
        files = sorted(_walk(f"{origin}/{prefix}", prefix, ()))
        if not files:
            raise InputError(f"{origin / prefix}: holds no images ({', '.join(SUFFIXES)})")
        names += files
        labels += [label[name]] * len(files)
    return PictureFiles(origin, names, labels)


def find_images(folder: Path) -> list[str]:
    """The images in a folder and those below it, as paths relative to it, sorted."""
    return sorted(name.removeprefix("./") for name in _walk(str(folder), ".", ()))


def _walk(folder: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """The images in a folder and those below it. `above`: device and inode of each folder around it in its class."""
    try:
        status = os.stat(folder)
        with os.scandir(folder) as scanned:
            entries = [(entry, entry.is_dir()) for entry in scanned]
    except OSError as error:
        raise InputError(f"{error.filename or folder}: cannot be read ({error.strerror})") from None
    place = status.st_dev, status.st_ino
    if place in above:
        raise InputError(f"{folder}: is a link to a folder that it is in; remove it")
    for entry, is_folder in entries:
        name = f"{prefix}/{entry.name}"
        if entry.name.startswith("."):
            continue
        if is_folder:
            yield from _walk(entry.path, name, (*above, place))
        elif entry.name.lower().endswith(SUFFIXES):
            yield name
