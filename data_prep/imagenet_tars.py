"""ImageNet-1k's official tars, read without unpacking. Train holds one tar per class; val is flat, its labels are in
the devkit.

Names, classes and order are those of the unpacked class folders, so that both give the same bytes.
"""

import io
import tarfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from widemix.data_prep.official import MOST, FileException, Unpacked, check_md5, read_member, warn_of
from widemix.data_prep.samples import Dataset, ImageSlices
from widemix.data_prep.tar_listing import list_tar
from widemix.errors import InputError
from widemix.files import open_regular
from widemix.tally import print_status

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
        members["train" if tar == TRAIN else "val"] = sorted(_train(origin / tar) if tar == TRAIN else _val(origin))
    order = classes or sorted({member.wnid for split in members.values() for member in split})
    label = {wnid: number for number, wnid in enumerate(order)}
    splits = {split: _images(origin, split, listed, label) for split, listed in members.items()}
    return Dataset(tuple(order), splits, check_files=partial(_check_files, origin))


def _check_files(origin: Path) -> tuple[FileException, ...]:
    tars = tars_in(origin)
    print_status(f"{origin}: checking the MD5 of {', '.join(tars)}")
    names = [*tars, DEVKIT] if VAL in tars else tars
    return warn_of(tuple(exception for name in names for exception in check_md5(origin / name, MD5[name])))


def _images(origin: Path, split: str, members: Sequence[_Member], label: dict[str, int]) -> ImageSlices:
    tar = origin / (TRAIN if split == "train" else VAL)
    if not members:
        raise InputError(f"{tar}: holds no images; download it again")
    unknown = [member.wnid for member in members if member.wnid not in label]
    if unknown:
        raise InputError(f"{tar}: holds {unknown[0]}, which is not in {origin / 'wnids.txt'}")
    return ImageSlices(
        str(tar),
        [f"{split}/{member.wnid}/{member.name}" for member in members],
        [label[member.wnid] for member in members],
        np.array([member.offset for member in members]),
        np.array([member.size for member in members]),
    )


def _train(path: Path) -> Iterator[_Member]:
    listed = list_tar(path, nested=True)
    for number, (offset, size) in enumerate(zip(listed.offsets.tolist(), listed.sizes.tolist(), strict=True)):
        part, _, name = listed.name(number).partition(".tar/")
        yield _Member(Path(part).name, Path(name).name, offset, size)


def _val(origin: Path) -> Iterator[_Member]:
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
    from widemix.data_prep.svhn import read_mat

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
