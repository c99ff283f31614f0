"""ImageNet as class folders, ROOT/{train,val}/<wnid>/*.JPEG or ROOT/<wnid>/*.JPEG, or as the official tars.

The second form is that of ImageNet-21k; all of it is train. Kaggle's has the folders in ROOT/ILSVRC/Data/CLS-LOC,
with a flat val. ROOT/wnids.txt, if it exists, sets the order of classes.
"""

import os
import re
from dataclasses import replace
from pathlib import Path

from widemix.data_prep.image_folder import class_folders, read_splits, split_folders
from widemix.data_prep.imagenet_tars import read_tars, tars_in
from widemix.data_prep.imagenet_val import is_flat, read_flat_val
from widemix.data_prep.samples import Dataset, FileSlice
from widemix.errors import InputError
from widemix.tally import print_status

KAGGLE = "ILSVRC/Data/CLS-LOC"
WNID = re.compile(r"n\d{8}")


def read(origin: Path) -> Dataset:
    """The splits in `origin`. Labels are the order of wnids.txt, by default of the wnids of all splits, sorted.

    For the whole ImageNet-1k both are the usual order. A part of ImageNet without wnids.txt has only its own classes,
    numbered from 0. Raises `InputError` for a folder in another layout.
    """
    listed = _read_wnids(origin / "wnids.txt")
    tars = tars_in(origin)
    inner = KAGGLE if (origin / KAGGLE).is_dir() else "."
    places = {split: f"{inner}/{name}".removeprefix("./") for split, name in split_folders(origin / inner).items()}
    if tars:
        if places:
            raise InputError(f"{origin}: holds {tars[0]} and the folder {next(iter(places))}; keep only one of them")
        return read_tars(origin, listed)
    flat = {split: place for split, place in places.items() if is_flat(origin / place)}
    for split, place in flat.items():
        del places[split]
        if split != "val":
            print_status(f"{origin / place}: left out, since nobody has published its labels")
    places, known = places or {"train": "."}, None if listed is None else set(listed)
    for place in places.values():
        for name in class_folders(origin / place):
            if not WNID.fullmatch(name):
                raise InputError(
                    f"{origin / place / name}: not a WordNet id such as n01440764; use the source image-folder"
                )
            if known is not None and name not in known:
                raise InputError(f"{origin / place / name}: is not in {origin / 'wnids.txt'}")
    dataset = read_splits(origin, places, listed)
    if "val" not in flat:
        return dataset
    val = read_flat_val(origin, flat["val"], dataset.classes)
    return replace(dataset, splits={**dataset.splits, "val": val})


def _read_wnids(path: Path) -> list[str] | None:
    """The first word of each line, in order."""
    if not os.path.lexists(path):
        return None
    try:
        text = FileSlice(str(path)).read().decode("utf-8")
        wnids = [line.split()[0] for line in text.splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    wrong = [wnid for wnid in wnids if not WNID.fullmatch(wnid)]
    twice = {wnid for wnid in wnids if wnids.count(wnid) > 1} if len(set(wnids)) < len(wnids) else set()
    if wrong or twice:
        raise InputError(
            f"{path}: {wrong[0]!r} is not a WordNet id" if wrong else f"{path}: {min(twice)} is listed twice"
        )
    return wnids
