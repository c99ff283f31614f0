"""SVHN, cropped digits (Netzer et al. 2011), in its .mat files: 32 x 32 pixels, stored raw. Label 10 is digit 0."""

import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from scipy.io import loadmat, whosmat

from widemix.data_prep.official import MOST_UNPACKED, FileException, check_labels, check_md5, find_file, warn_of
from widemix.data_prep.samples import Dataset, PixelArrays
from widemix.errors import InputError
from widemix.files import open_regular

COMPRESSED = 15  # the type of an element of a MATLAB file of version 5
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
