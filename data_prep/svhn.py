"""SVHN, cropped digits (Netzer et al. 2011), in its .mat files: 32 x 32 pixels, stored raw. Label 10 is digit 0."""

from pathlib import Path
from typing import Any

import numpy as np
from scipy.io import loadmat, whosmat

from widemix.data_prep.official import FileException, check_labels, check_md5, find_file, warn_of
from widemix.data_prep.samples import Dataset, PixelArrays
from widemix.errors import InputError

FILES = {
    "train": ("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
    "test": ("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    "extra": ("extra_32x32.mat", "a93ce644f1a588dc4d68dda5feec44a7"),
}


def read(origin: Path) -> Dataset:
    """Those of train (73,257), test (26,032) and extra (531,131) whose files exist."""
    splits: dict[str, PixelArrays] = {}
    exceptions: tuple[FileException, ...] = ()
    for split, (name, md5) in FILES.items():
        path = find_file(origin, "svhn", name)
        if path is not None:
            splits[split] = _split(path, split)
            exceptions += check_md5(path, md5)
    if not splits:
        raise InputError(f"{origin}: holds none of {', '.join(name for name, _ in FILES.values())}")
    return Dataset(tuple("0123456789"), splits, warn_of(exceptions))


def _split(path: Path, split: str) -> PixelArrays:
    arrays = read_arrays(path)
    pixels, labels = arrays.get("X"), arrays.get("y")
    if pixels is None or labels is None or pixels.dtype != np.uint8 or pixels.shape != (32, 32, 3, labels.size):
        raise InputError(f"{path}: has no uint8 X [32, 32, 3, n] and y [n, 1]; use the cropped digits (format 2)")
    return PixelArrays(split, pixels.transpose(3, 0, 1, 2), check_labels(path, labels.reshape(-1), 1, 10) % 10)


def read_arrays(path: Path) -> dict[str, Any]:
    """Every variable of a .mat file by name; raises `InputError` for a file that cannot be read."""
    try:
        if any(length < 0 for _, shape, _ in whosmat(path) for length in shape):
            raise ValueError("negative dimensions")
        variables = loadmat(path)
    except Exception as error:  # scipy raises many types for a damaged file
        raise InputError(f"{path}: cannot be read as a MATLAB file ({error!r}); download it again") from None
    return {name: value for name, value in variables.items() if not name.startswith("__")}
