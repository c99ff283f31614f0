"""Datasets that are arrays, stored raw.

scikit-learn's 1,797 handwritten digits, 8 x 8 pixels (UCI optical recognition; no download).
MNIST (LeCun et al. 1998) in its four idx files, compressed or not: 28 x 28 grey levels, stored as RGB.
SVHN, cropped digits (Netzer et al. 2011), in its .mat files: 32 x 32 pixels; label 10 is digit 0.
STL-10 (Coates, Lee & Ng 2011) in its binary files: 96 x 96 pixels.
"""

import math
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from scipy.io import loadmat, whosmat

from widemix.data_prep.samples import Dataset, PixelArrays
from widemix.data_prep.sources.official import (
    MOST,
    MOST_UNPACKED,
    FileException,
    Layout,
    check_labels,
    check_md5,
    find_file,
    read_files,
    unpack,
    warn_of,
)
from widemix.errors import InputError
from widemix.files import open_regular


def read_digits(origin: None) -> Dataset:
    """1,437 training and 360 test images: every fifth image of each digit, in scikit-learn's order, is for the test.

    `origin` is not used.
    """
    from sklearn.datasets import load_digits

    scans = load_digits()
    grey = np.rint(scans.images * (255 / 16)).astype(np.uint8)
    pixels = np.repeat(grey[..., None], 3, axis=3)
    test = np.zeros(len(grey), bool)
    test[np.argsort(scans.target, kind="stable")[::5]] = True
    splits = {
        name: PixelArrays(name, pixels[chosen], scans.target[chosen])
        for name, chosen in (("train", ~test), ("test", test))
    }
    return Dataset(tuple("0123456789"), splits)


GZ = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
LAYOUTS = [Layout("MNIST/raw", "", files) for files in (GZ, dict.fromkeys((name[:-3] for name in GZ), ""))]


def read_mnist(origin: Path) -> Dataset:
    """60,000 training and 10,000 test images, in the official order."""
    _, files, exceptions = read_files(origin, LAYOUTS)
    train, train_labels, test, test_labels = (
        _idx(name, data, axes=1 if "labels" in name else 3) for name, data in files.items()
    )
    splits = {}
    for name, grey, labels in (("train", train, train_labels), ("test", test, test_labels)):
        if grey.shape != (len(labels), 28, 28):
            raise InputError(
                f"{origin}: the {name} files have shapes {grey.shape} and {labels.shape}; download them again"
            )
        labels = check_labels(f"{origin}: the {name} file", labels, 0, 9)
        splits[name] = PixelArrays(name, np.broadcast_to(grey[..., None], (*grey.shape, 3)), labels)
    return Dataset(tuple("0123456789"), splits, exceptions)


def _idx(name: str, data: bytes, axes: int) -> np.ndarray:
    """An idx file of so many axes: two zeros, type 8 (uint8), their number, their big-endian lengths, the values."""
    try:
        body = unpack(data, MOST)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{name}: cannot be decompressed ({error}); download it again") from None
    shape = [int.from_bytes(body[i : i + 4]) for i in range(4, 4 + 4 * axes, 4)]
    if body[:4] != bytes((0, 0, 8, axes)) or len(body) != 4 + 4 * axes + math.prod(shape):
        raise InputError(f"{name}: is not an idx file of bytes with {axes} axes, or is cut short; download it again")
    return np.frombuffer(body, np.uint8, offset=4 + 4 * axes).reshape(shape)


COMPRESSED = 15  # the type of an element of a MATLAB file of version 5
SVHN = {
    "train": ("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
    "test": ("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    "extra": ("extra_32x32.mat", "a93ce644f1a588dc4d68dda5feec44a7"),
}


def read_svhn(origin: Path) -> Dataset:
    """Those of train (73,257), test (26,032) and extra (531,131) whose files exist."""
    splits: dict[str, PixelArrays] = {}
    exceptions: tuple[FileException, ...] = ()
    for split, (name, md5) in SVHN.items():
        path = find_file(origin, "svhn", name)
        if path is not None:
            splits[split] = _svhn_split(path, split)
            exceptions += check_md5(path, md5)
    if not splits:
        raise InputError(f"{origin}: holds none of {', '.join(name for name, _ in SVHN.values())}")
    return Dataset(tuple("0123456789"), splits, warn_of(exceptions))


def _svhn_split(path: Path, split: str) -> PixelArrays:
    arrays = read_arrays(path)
    pixels, labels = arrays.get("X"), arrays.get("y")
    if pixels is None or labels is None or pixels.dtype != np.uint8 or pixels.shape != (32, 32, 3, labels.size):
        raise InputError(f"{path}: has no uint8 X [32, 32, 3, n] and y [n, 1]; use the cropped digits (format 2)")
    return PixelArrays(split, pixels.transpose(3, 0, 1, 2), check_labels(path, labels.reshape(-1), 1, 10) % 10)


def read_arrays(path: Path) -> dict[str, Any]:
    """Every variable of a .mat file by name; raises `InputError` for a file that cannot be read."""
    try:
        with open_regular(path) as file:
            if any(length < 0 for _, shape, _ in whosmat(file) for length in shape):
                raise ValueError("negative dimensions")
            return read_mat(file, MOST_UNPACKED)
    except InputError:
        raise
    except Exception as error:  # scipy raises many types for a damaged file
        raise InputError(f"{path}: cannot be read as a MATLAB file ({error!r}); download it again") from None


def read_mat(file: BinaryIO, most: int, **options: Any) -> dict[str, Any]:
    """Every variable of a MATLAB file by name. Raises any error, and `ValueError` if it unpacks to more bytes."""
    file.seek(126)
    order, left = "<" if file.read(2) == b"IM" else ">", most
    while len(head := file.read(8)) == 8:
        kind, size = struct.unpack(f"{order}II", head)
        end, inflate = file.tell() + size, zlib.decompressobj()
        while kind == COMPRESSED and (piece := file.read(min(1 << 20, end - file.tell()))):
            while piece and left >= 0:
                left -= len(inflate.decompress(piece, 1 << 20))
                piece = inflate.unconsumed_tail
        if left < 0:
            raise ValueError(f"it unpacks to more than {most:,} bytes, the most that such a file can need")
        file.seek(end)
    file.seek(0)
    return {name: value for name, value in loadmat(file, **options).items() if not name.startswith("__")}


STL10_FOLDER = "stl10_binary"
STL10_PIXELS = 3 * 96 * 96
STL10 = {
    "train_X.bin": "918c2871b30a85fa023e0c44e0bee87f",
    "train_y.bin": "5a34089d4802c674881badbb80307741",
    "test_X.bin": "7f263ba9f9e0b06b93213547f721ac82",
    "test_y.bin": "36f9794fa4beb8a2c72628de14fa638e",
    "unlabeled_X.bin": "5242ba1fed5e4be9e1e742405eb56ca4",
}
STL10_CLASSES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")


def read_stl10(origin: Path) -> Dataset:
    """train (5,000) and test (8,000), and if their files exist, fold0 to fold9 of train and unlabeled (100,000).

    Unlabelled images have the label -1. The folds are listed in fold_indices.txt.
    """
    files = {name: path for name in STL10 if (path := find_file(origin, STL10_FOLDER, name)) is not None}
    missing = [name for name in list(STL10)[:4] if name not in files]
    if missing:
        tar = "; unpack stl10_binary.tar.gz first" if (origin / "stl10_binary.tar.gz").exists() else ""
        raise InputError(f"{origin}: lacks {', '.join(missing)}{tar}")
    exceptions = warn_of(tuple(found for name, path in files.items() for found in check_md5(path, STL10[name])))
    train, test = (
        _stl10_split(split, files[f"{split}_X.bin"], files[f"{split}_y.bin"]) for split in ("train", "test")
    )
    splits = {"train": train, "test": test}
    folds = find_file(origin, STL10_FOLDER, "fold_indices.txt")
    if folds is not None:
        splits |= _stl10_folds(folds, train)
    if "unlabeled_X.bin" in files:
        pixels = _stl10_pixels(files["unlabeled_X.bin"])
        splits["unlabeled"] = PixelArrays("unlabeled", pixels, np.full(len(pixels), -1))
    return Dataset(STL10_CLASSES, splits, exceptions)


def _stl10_pixels(path: Path) -> np.ndarray:
    """uint8 [n, 96, 96, 3], memory-mapped; the file stores each channel by columns."""
    size = path.stat().st_size
    if not size or size % STL10_PIXELS:
        raise InputError(f"{path}: has {size} bytes, not a multiple of {STL10_PIXELS}; download it again")
    return np.memmap(path, np.uint8, "r", shape=(size // STL10_PIXELS, 3, 96, 96)).transpose(0, 3, 2, 1)


def _stl10_split(split: str, pixels: Path, labels: Path) -> PixelArrays:
    numbers, images = np.fromfile(labels, np.uint8), _stl10_pixels(pixels)
    if len(numbers) != len(images):
        raise InputError(f"{labels}: must hold a label of 1 to 10 for each of the {len(images)} images")
    return PixelArrays(split, images, check_labels(labels, numbers, 1, 10) - 1)


def _stl10_folds(path: Path, train: PixelArrays) -> dict[str, PixelArrays]:
    folds = {}
    for number, line in enumerate(path.read_bytes().splitlines()):
        words = line.split()
        chosen = np.array([int(word) if word.isdigit() and len(word) < 10 else -1 for word in words], np.int64)
        if not len(chosen) or chosen.min() < 0 or chosen.max() >= len(train):
            raise InputError(f"{path}: line {number + 1} must hold indices of 0 to {len(train) - 1}")
        folds[f"fold{number}"] = PixelArrays(f"fold{number}", train.pixels[chosen], train.labels[chosen])
    return folds
