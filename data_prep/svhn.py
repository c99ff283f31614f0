"""SVHN, cropped digits (Netzer et al. 2011), in its .mat files: 32 x 32 pixels, stored raw. Label 10 is digit 0."""

from pathlib import Path

import numpy as np

from data_prep.matlab import read_arrays
from data_prep.official import Note, check_md5, find_file
from data_prep.samples import Dataset, PixelArrays
from pipeline.errors import InputError

FILES = {
    "train": ("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
    "test": ("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    "extra": ("extra_32x32.mat", "a93ce644f1a588dc4d68dda5feec44a7"),
}


def read(origin: Path) -> Dataset:
    """The splits whose files are there, of train (73,257), test (26,032) and extra (531,131)."""
    splits: dict[str, PixelArrays] = {}
    notes: tuple[Note, ...] = ()
    for split, (name, md5) in FILES.items():
        path = find_file(origin, "svhn", name)
        if path is not None:
            splits[split] = _split(path, split)
            notes += check_md5(path, md5)
    if not splits:
        raise InputError(f"{origin}: holds none of {', '.join(name for name, _ in FILES.values())}")
    return Dataset(tuple("0123456789"), splits, notes)


def _split(path: Path, split: str) -> PixelArrays:
    arrays = read_arrays(path)
    pixels, labels = arrays.get("X"), arrays.get("y")
    if pixels is None or labels is None or pixels.dtype != np.uint8 or pixels.shape != (labels.size, 3, 32, 32):
        raise InputError(f"{path}: holds no X of bytes [32, 32, 3, n] and y [n, 1]; take the cropped digits")
    if labels.min() < 1 or labels.max() > 10:
        raise InputError(f"{path}: has labels outside of 1 to 10; fetch it again")
    return PixelArrays(split, pixels.transpose(0, 3, 2, 1), labels.reshape(-1).astype(np.int64) % 10)
