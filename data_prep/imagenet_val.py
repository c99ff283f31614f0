"""ImageNet's validation images in one flat folder, labelled by a list: Kaggle's, or the official devkit's."""

import csv
import os
from collections.abc import Sequence
from pathlib import Path

from widemix.data_prep.imagenet_tars import DEVKIT, validation_wnids
from widemix.data_prep.listing import Images, is_hidden
from widemix.data_prep.samples import ImageFiles
from widemix.errors import InputError

SOLUTION = "LOC_val_solution.csv"  # Kaggle's: lines "ILSVRC2012_val_00048981,n03995372 85 1 499 272"


def is_flat(folder: Path) -> bool:
    """Whether a folder holds images, and no class folders."""
    with os.scandir(folder) as entries:
        names = [(entry.name, entry.is_dir()) for entry in entries if not is_hidden(entry.name)]
    return not any(folder for _, folder in names) and any(Images().is_image(f"{folder}/{name}") for name, _ in names)


def read_flat_val(origin: Path, place: str, classes: Sequence[str]) -> ImageFiles:
    """The images of the flat folder `place` in `origin`, by class and name, as class folders would have them.

    Raises `InputError` without a list in `origin`, and for images that the list or the classes do not have.
    """
    source, wnids = _labels(origin, place)
    number = {wnid: label for label, wnid in enumerate(classes)}
    listed, images = [], Images()
    for name in images.find(str(origin / place)):
        stem = os.path.splitext(name)[0]
        if stem not in wnids:
            raise InputError(f"{origin / place / name}: has no label in {source}")
        if wnids[stem] not in number:
            raise InputError(f"{origin / place / name}: is of class {wnids[stem]}, which the training split lacks")
        listed.append((number[wnids[stem]], f"{place}/{name}"))
    listed.sort()
    images.print_others(origin / place)
    return ImageFiles(origin, [name for _, name in listed], [label for label, _ in listed])


def _labels(origin: Path, place: str) -> tuple[Path, dict[str, str]]:
    """The list that was found, and the wnid of each image by its name without suffix."""
    path = origin / SOLUTION
    if path.is_file():
        try:
            with path.open(encoding="utf-8", newline="") as file:
                return path, {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(file)}
        except (OSError, UnicodeDecodeError, csv.Error, KeyError, IndexError, AttributeError) as error:
            raise InputError(f"{path}: is not Kaggle's list of validation labels ({error!r})") from None
    if (origin / DEVKIT).is_file():
        wnids = validation_wnids(origin / DEVKIT)
        return origin / DEVKIT, {f"ILSVRC2012_val_{number:08}": wnid for number, wnid in enumerate(wnids, 1)}
    raise InputError(
        f"{origin / place}: has no class folders, and {origin} neither {SOLUTION} nor {DEVKIT} with labels"
    )
