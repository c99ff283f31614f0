"""Any images in class folders: ROOT/{train,val,test}/CLASS/**/*.jpg; val may also be named validation or valid."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from widemix.data_prep.samples import Dataset, ImageFiles
from widemix.data_prep.sources.listing import SUFFIXES, Images, is_hidden
from widemix.errors import InputError
from widemix.progress_line import print_status

SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "validation", "valid"), "test": ("test",)}
SPLIT_OF = {name: split for split, names in SPLIT_FOLDERS.items() for name in names}


def read(origin: Path) -> Dataset:
    """The splits in `origin`. Labels are the class folders of all splits, sorted; samples go by class and path.

    Raises `InputError` if there is no split, a split has no class folder, or a class folder no image.
    """
    places = split_folders(origin)
    if not places:
        raise InputError(f"{origin}: holds none of the folders train, val and test{_cure(origin)}")
    others = sorted({path.name for path in origin.iterdir() if path.is_dir()} - set(places.values()))
    strange = [name for name in others if not is_hidden(name)]
    if strange:
        known = ", ".join(name for names in SPLIT_FOLDERS.values() for name in names)
        print_status(f"{origin}: left out the folder {', '.join(strange[:5])}: a split is named {known}")
    return read_splits(origin, places, classes=None)


def _cure(origin: Path) -> str:
    """Return the advice for a folder that holds images in another layout, or that is a split itself."""
    if origin.absolute().name in SPLIT_OF:
        return f"; as it is one of them, give the folder that holds it: --from {origin.absolute().parent}"
    if any(path.suffix.lower() in SUFFIXES for path in origin.glob("*/*")):
        return f"; move its class folders into {origin / 'train'}, and --holdout 10% takes a split to evaluate on"
    if any(path.suffix.lower() in SUFFIXES for path in origin.glob("*")):
        return f", but images without classes; put them into folders {origin / 'train'}/CLASS"
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
    images = Images()
    splits = {split: _images(origin, places[split], names, label, images) for split, names in folders.items()}
    images.print_others(origin)
    return Dataset(order, splits)


def class_folders(folder: Path) -> list[str]:
    """The names of the class folders of one split, sorted. Raises `InputError` if there are none."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if not is_hidden(entry.name) and entry.is_dir())
    except OSError as error:
        raise InputError(f"{error.filename or folder}: cannot be read ({error.strerror})") from None
    if not names:
        raise InputError(f"{folder}: holds no class folders; put its images into one folder for each class")
    return names


def _images(origin: Path, place: str, classes: Sequence[str], label: dict[str, int], images: Images) -> ImageFiles:
    names: list[str] = []
    labels: list[int] = []
    for name in classes:
        prefix, found = f"{place}/{name}".removeprefix("./"), Images()
        files = found.find(f"{origin}/{prefix}", f"{prefix}/")
        if not files:
            held = "".join(f"; left out {phrase}" for phrase in found.describe_others())
            raise InputError(f"{origin / prefix}: holds no images ({', '.join(SUFFIXES)}){held}")
        images.others += found.others
        names += files
        labels += [label[name]] * len(files)
    _check_level(origin, place, classes, names)
    return ImageFiles(origin, names, labels)


def _check_level(origin: Path, place: str, classes: Sequence[str], names: Sequence[str]) -> None:
    """Look for images above the class folders, and for class folders that are a level too deep.

    Raises `InputError` for the folder of a split within one, as an archive leaves it that was unpacked into a folder
    of its name: DIR/train/train/CLASS.
    """
    with os.scandir(origin / place) as entries:
        names_here = [entry.name for entry in entries if entry.is_file() and not is_hidden(entry.name)]
    loose = sum(name.lower().endswith(SUFFIXES) for name in names_here)
    if loose:
        print_status(f"{origin / place}: left out {loose:,} images that are in no class folder")
    folder, above = origin / place / classes[0], len(Path(place, classes[0]).parts)
    is_flat = [name.count("/") == above for name in names]
    if not all(is_flat) and all(name.lower() in SPLIT_OF for name in classes):
        cure = f"move the folders of classes up to {origin / place}"
        raise InputError(f"{folder}: is named as a split, and holds folders; {cure}")
    if len(classes) == 1 and not any(is_flat):
        inner = ", ".join(sorted({name.split("/")[above] for name in names})[:3])
        print_status(f"warning: {folder}: is the only class; if its folders ({inner}, ...) are, move them up by one")
