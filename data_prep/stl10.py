"""STL-10 (Coates, Lee & Ng 2011) in its binary files: 96 x 96 pixels, stored raw."""

from pathlib import Path

import numpy as np

from widemix.data_prep.official import check_labels, check_md5, find_file, warn_of
from widemix.data_prep.samples import Dataset, PixelArrays
from widemix.errors import InputError

FOLDER = "stl10_binary"
PIXELS = 3 * 96 * 96
MD5 = {
    "train_X.bin": "918c2871b30a85fa023e0c44e0bee87f",
    "train_y.bin": "5a34089d4802c674881badbb80307741",
    "test_X.bin": "7f263ba9f9e0b06b93213547f721ac82",
    "test_y.bin": "36f9794fa4beb8a2c72628de14fa638e",
    "unlabeled_X.bin": "5242ba1fed5e4be9e1e742405eb56ca4",
}
CLASSES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")


def read(origin: Path) -> Dataset:
    """train (5,000) and test (8,000), and if their files exist, fold0 to fold9 of train and unlabeled (100,000).

    Unlabelled images have the label -1. The folds are listed in fold_indices.txt.
    """
    files = {name: path for name in MD5 if (path := find_file(origin, FOLDER, name)) is not None}
    missing = [name for name in list(MD5)[:4] if name not in files]
    if missing:
        tar = "; unpack stl10_binary.tar.gz first" if (origin / "stl10_binary.tar.gz").exists() else ""
        raise InputError(f"{origin}: lacks {', '.join(missing)}{tar}")
    exceptions = warn_of(tuple(found for name, path in files.items() for found in check_md5(path, MD5[name])))
    train, test = (_labelled(split, files[f"{split}_X.bin"], files[f"{split}_y.bin"]) for split in ("train", "test"))
    splits = {"train": train, "test": test}
    folds = find_file(origin, FOLDER, "fold_indices.txt")
    if folds is not None:
        splits |= _folds(folds, train)
    if "unlabeled_X.bin" in files:
        pixels = _pixels(files["unlabeled_X.bin"])
        splits["unlabeled"] = PixelArrays("unlabeled", pixels, np.full(len(pixels), -1))
    return Dataset(CLASSES, splits, exceptions)


def _pixels(path: Path) -> np.ndarray:
    """uint8 [n, 96, 96, 3], memory-mapped; the file stores each channel by columns."""
    size = path.stat().st_size
    if not size or size % PIXELS:
        raise InputError(f"{path}: has {size} bytes, not a multiple of {PIXELS}; download it again")
    return np.memmap(path, np.uint8, "r", shape=(size // PIXELS, 3, 96, 96)).transpose(0, 3, 2, 1)


def _labelled(split: str, pixels: Path, labels: Path) -> PixelArrays:
    numbers, images = np.fromfile(labels, np.uint8), _pixels(pixels)
    if len(numbers) != len(images):
        raise InputError(f"{labels}: must hold a label of 1 to 10 for each of the {len(images)} images")
    return PixelArrays(split, images, check_labels(labels, numbers, 1, 10) - 1)


def _folds(path: Path, train: PixelArrays) -> dict[str, PixelArrays]:
    folds = {}
    for number, line in enumerate(path.read_bytes().splitlines()):
        words = line.split()
        chosen = np.array([int(word) if word.isdigit() and len(word) < 10 else -1 for word in words], np.int64)
        if not len(chosen) or chosen.min() < 0 or chosen.max() >= len(train):
            raise InputError(f"{path}: line {number + 1} must hold indices of 0 to {len(train) - 1}")
        folds[f"fold{number}"] = PixelArrays(f"fold{number}", train.pixels[chosen], train.labels[chosen])
    return folds
