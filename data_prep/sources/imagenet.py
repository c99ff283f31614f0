"""ImageNet as class folders, ROOT/{train,val}/<wnid>/*.JPEG or ROOT/<wnid>/*.JPEG, or as the official tars.

The second form is that of ImageNet-21k; all of it is train. Kaggle's has the folders in ROOT/ILSVRC/Data/CLS-LOC,
with a flat val, labelled by its list or by that of the official devkit. ROOT/wnids.txt, if it exists, sets the order
of classes. The tars are read without unpacking: train holds one tar per class; val is flat, its labels are in the
devkit. Names, classes and order are those of the unpacked class folders, so that both give the same bytes.
"""

import csv
import io
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from widemix.data_prep.samples import Dataset, FileSlice, ImageFiles, TarImages
from widemix.data_prep.sources.image_folder import class_folders, read_splits, split_folders
from widemix.data_prep.sources.listing import Images, is_hidden
from widemix.data_prep.sources.official import MOST, FileException, Unpacked, check_md5, read_member, warn_of
from widemix.data_prep.sources.tar_listing import list_tar
from widemix.errors import InputError
from widemix.files import open_regular
from widemix.progress_line import print_status

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


TRAIN, VAL, DEVKIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"
MD5 = {
    TRAIN: "1d675b47d978889d74fa0da5fadfb00e",
    VAL: "29b22e2961454d5413ddabcf34fc5622",
    DEVKIT: "fa75699e90414af021442c21a62c3abf",
}
MOST_OF_META = 64 << 20  # bytes of meta.mat, unpacked
GROUND_TRUTH, META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"


class _Member(NamedTuple):
    """An image in a tar. Members sort like the files in class folders."""

    wnid: str
    name: str
    offset: int  # bytes from the start of the outer tar
    size: int  # bytes


def tars_in(origin: Path) -> list[str]:
    """Which of the two image tars are in the folder `origin`. Raises `InputError` for a link that leads to none."""
    for name in (TRAIN, VAL):
        if (origin / name).is_symlink() and not (origin / name).exists():
            raise InputError(f"{origin / name}: is a link to a file that does not exist")
    return [name for name in (TRAIN, VAL) if (origin / name).is_file()]


def read_tars(origin: Path, classes: Sequence[str] | None) -> Dataset:
    """The splits whose tars are in `origin`. Labels are the order of `classes`, by default of all wnids, sorted.

    Raises `InputError` if a tar is damaged, or the devkit is missing.
    """
    members: dict[str, list[_Member]] = {}
    for tar in tars_in(origin):
        print_status(f"{origin / tar}: listing its images")
        members["train" if tar == TRAIN else "val"] = sorted(
            _train_members(origin / tar) if tar == TRAIN else _val_members(origin)
        )
    order = classes or sorted({member.wnid for split in members.values() for member in split})
    label = {wnid: number for number, wnid in enumerate(order)}
    splits = {split: _tar_images(origin, split, listed, label) for split, listed in members.items()}
    return Dataset(tuple(order), splits, check_files=partial(_check_files, origin))


def _check_files(origin: Path) -> tuple[FileException, ...]:
    tars = tars_in(origin)
    print_status(f"{origin}: checking the MD5 of {', '.join(tars)}")
    names = [*tars, DEVKIT] if VAL in tars else tars
    return warn_of(tuple(exception for name in names for exception in check_md5(origin / name, MD5[name])))


def _tar_images(origin: Path, split: str, members: Sequence[_Member], label: dict[str, int]) -> TarImages:
    tar = origin / (TRAIN if split == "train" else VAL)
    if not members:
        raise InputError(f"{tar}: holds no images; download it again")
    unknown = [member.wnid for member in members if member.wnid not in label]
    if unknown:
        raise InputError(f"{tar}: holds {unknown[0]}, which is not in {origin / 'wnids.txt'}")
    names = [f"{member.wnid}/{member.name}".encode("utf-8", "surrogateescape") for member in members]
    columns = zip(*((label[member.wnid], member.offset, member.size) for member in members), strict=True)
    numbers = (np.array(column, np.int64) for column in columns)
    return TarImages([tar], [split], np.zeros(len(names), np.int64), np.array(names, np.bytes_), *numbers)


def _train_members(path: Path) -> Iterator[_Member]:
    listed = list_tar(path, nested=True)
    for number, (offset, size) in enumerate(zip(listed.offsets.tolist(), listed.sizes.tolist(), strict=True)):
        part, _, name = listed.name(number).partition(".tar/")
        yield _Member(Path(part).name, Path(name).name, offset, size)


def _val_members(origin: Path) -> Iterator[_Member]:
    wnids = validation_wnids(origin / DEVKIT)
    path = origin / VAL
    members = list_tar(path)
    if len(members.names) != len(wnids):
        raise InputError(
            f"{path}: holds {len(members.names)} images, and {DEVKIT} labels {len(wnids)}; download it again"
        )
    for index, (offset, size) in enumerate(zip(members.offsets.tolist(), members.sizes.tolist(), strict=True)):
        name = Path(members.name(index)).name
        number = name.removesuffix(".JPEG").rpartition("_")[2]
        if not number.isdecimal() or not 1 <= int(number) <= len(wnids):
            raise InputError(f"{path}: {DEVKIT} has no label for {name}")
        yield _Member(wnids[int(number) - 1], name, offset, size)


def validation_wnids(devkit: Path) -> list[str]:
    """The wnid of each validation image, in the order of their numbers."""
    from widemix.data_prep.sources.arrays import read_mat

    files: dict[str, bytes] = {}
    try:
        with open_regular(devkit) as file, tarfile.open(fileobj=Unpacked(file, MOST), mode="r|") as tar:
            for member in tar:
                name = Path(member.name).name
                if name in (GROUND_TRUTH, META) and member.isfile():
                    files[name] = read_member(tar, member)
        lines = files[GROUND_TRUTH].split()
        synsets = read_mat(io.BytesIO(files[META]), MOST_OF_META, simplify_cells=True)["synsets"]
        wnid = {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in synsets}
        return [wnid[int(line)] for line in lines]
    except FileNotFoundError:
        raise InputError(f"{devkit}: is missing; it holds the labels of {VAL}") from None
    except Exception as error:  # a damaged tar or .mat raises many types
        raise InputError(f"{devkit}: is not ImageNet's devkit ({error!r}); download it again") from None


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
    source, wnids = _val_labels(origin, place)
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


def _val_labels(origin: Path, place: str) -> tuple[Path, dict[str, str]]:
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
