"""MNIST (LeCun et al. 1998) in its four idx files, compressed or not: 28 x 28 grey levels, stored raw as RGB."""

import math
import zlib
from pathlib import Path

import numpy as np

from widemix.data_prep.official import MOST, Layout, check_labels, read_files, unpack
from widemix.data_prep.samples import Dataset, PixelArrays
from widemix.errors import InputError

GZ = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
LAYOUTS = [Layout("MNIST/raw", "", files) for files in (GZ, dict.fromkeys((name[:-3] for name in GZ), ""))]


def read(origin: Path) -> Dataset:
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
