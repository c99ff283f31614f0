"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) in the python and binary versions: 32 x 32 pixels, stored raw."""

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from widemix.data_prep.samples import Dataset, PixelArrays
from widemix.data_prep.sources.official import Layout, check_labels, read_files
from widemix.errors import InputError

PIXELS = 3 * 32 * 32
KINDS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8")  # of the arrays that are read

CIFAR10_PYTHON = Layout(
    "cifar-10-batches-py",
    "cifar-10-python.tar.gz",
    {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
        "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    },
)
CIFAR10_BINARY = Layout(
    "cifar-10-batches-bin",
    "cifar-10-binary.tar.gz",
    dict.fromkeys([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin", "batches.meta.txt"], ""),
    "c32a1d4ab5d03f1284b67883e8d87530",
)
CIFAR100_PYTHON = Layout(
    "cifar-100-python",
    "cifar-100-python.tar.gz",
    {
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        "meta": "7973b15100ade9c7d40fb424638fde48",
    },
)
CIFAR100_BINARY = Layout(
    "cifar-100-binary",
    "cifar-100-binary.tar.gz",
    dict.fromkeys(["train.bin", "test.bin", "fine_label_names.txt"], ""),
    "03b5dce01913d631647c71ecec9e9cb8",
)


class _Keys(NamedTuple):
    """The differences between CIFAR-10 and CIFAR-100."""

    labels: str  # key of a pickled batch
    names: str  # key of the pickled meta file
    label_bytes: int  # before the pixels of a binary record; the last of them is the (fine) label


CIFAR10 = _Keys("labels", "label_names", 1)
CIFAR100 = _Keys("fine_labels", "fine_label_names", 2)


def cifar10(origin: Path) -> Dataset:
    """50,000 training and 10,000 test images of 10 classes, in the official order."""
    return _read(origin, CIFAR10, CIFAR10_PYTHON, CIFAR10_BINARY)


def cifar100(origin: Path) -> Dataset:
    """50,000 training and 10,000 test images of the 100 fine classes, in the official order."""
    return _read(origin, CIFAR100, CIFAR100_PYTHON, CIFAR100_BINARY)


def _read(origin: Path, keys: _Keys, python: Layout, binary: Layout) -> Dataset:
    layout, files, exceptions = read_files(origin, (python, binary))
    *batches, meta = files
    if layout is python:
        parts = {name: _pickled_batch(name, files[name], keys) for name in batches}
        [names] = _unpickle(meta, files[meta], keys.names)
    else:
        parts = {name: _binary_batch(name, files[name], keys) for name in batches}
        names = files[meta].decode("ascii", "replace").split()
    if (
        not isinstance(names, list)
        or not names
        or not all(isinstance(name, str) and name.isascii() for name in names)
    ):
        raise InputError(f"{meta}: does not list the names of the classes; download it again")
    classes = tuple(names)
    checked = {name: check_labels(name, labels, 0, len(classes) - 1) for name, (_, labels) in parts.items()}
    *train, test = ((pixels, checked[name]) for name, (pixels, _) in parts.items())
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
    splits = {"train": _images("train", pixels, labels), "test": _images("test", *test)}
    return Dataset(classes, splits, exceptions)


def _images(name: str, pixels: np.ndarray, labels: np.ndarray) -> PixelArrays:
    return PixelArrays(name, pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels)


def _binary_batch(name: str, data: bytes, keys: _Keys) -> tuple[np.ndarray, np.ndarray]:
    record = keys.label_bytes + PIXELS
    if not data or len(data) % record:
        raise InputError(f"{name}: has {len(data)} bytes, not a multiple of {record}; download it again")
    records = np.frombuffer(data, np.uint8).reshape(-1, record)
    return records[:, keys.label_bytes :], records[:, keys.label_bytes - 1].astype(np.int64)


def _pickled_batch(name: str, data: bytes, keys: _Keys) -> tuple[np.ndarray, Any]:
    pixels, labels = _unpickle(name, data, "data", keys.labels)
    count = len(labels) if isinstance(labels, list | np.ndarray) and np.shape(labels[:1]) == (1,) else 0
    if not (isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.shape == (count, PIXELS)):
        raise InputError(
            f"{name}: is not a batch of images of {PIXELS} bytes and a list of as many {keys.labels}; "
            "download it again"
        )
    return pixels, labels


class _Dtype:
    """A NumPy dtype in a pickle: its kind, and the byte order that it is given afterwards."""

    def __init__(self, kind: str, *_: Any) -> None:
        self.kind = kind

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]


class _Bytes:
    """Bytes that Python 3 has written as text, for Python 2."""

    def __init__(self, text: str, *_: Any) -> None:
        self.text = text

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("bytes have no state")


class _Array:
    """A NumPy array in a pickle. NumPy's own would take any dtype, and the file's bytes for pointers to objects."""

    def __init__(self, *_: Any) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        """The array: of plain numbers, with exactly the bytes of its shape."""
        _, shape, dtype, by_columns, data = self.state
        if not isinstance(dtype, _Dtype) or dtype.kind not in KINDS:
            raise pickle.UnpicklingError("it has an array of others than plain numbers")
        text = data.text if isinstance(data, _Bytes) else data
        numbers = np.frombuffer(text.encode("latin1") if isinstance(text, str) else text, dtype.kind)
        return numbers.view(numbers.dtype.newbyteorder(dtype.order)).reshape(shape, order="F" if by_columns else "C")


class _ArraysOnly(pickle.Unpickler):
    """Unpickles what becomes NumPy arrays: other pickles could run any code."""

    def find_class(self, module: str, name: str) -> Any:
        allowed: dict[tuple[str, str], type] = {
            ("numpy", "ndarray"): _Array,
            ("numpy", "dtype"): _Dtype,
            ("numpy.core.multiarray", "_reconstruct"): _Array,
            ("numpy._core.multiarray", "_reconstruct"): _Array,
            ("_codecs", "encode"): _Bytes,
        }
        if (module, name) in allowed:
            return allowed[module, name]
        raise pickle.UnpicklingError(f"it needs {module}.{name}")


def _unpickle(name: str, data: bytes, *keys: str) -> list[Any]:
    """The values at these keys of a pickled dict, None for one that it lacks."""
    try:
        for opcode, argument, _ in pickletools.genops(data):
            # Memory would be taken for so many values.
            if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(data):
                raise pickle.UnpicklingError(f"it numbers a value {argument}")
        content = _ArraysOnly(io.BytesIO(data), encoding="latin1").load()
        if not isinstance(content, dict):
            raise pickle.UnpicklingError(f"it holds a {type(content).__name__}")
        values = [content.get(key) for key in keys]
        return [value.array() if isinstance(value, _Array) else value for value in values]
    except Exception as error:  # a damaged pickle raises almost any type
        raise InputError(f"{name}: is not one of CIFAR's pickles ({error}); download it again") from None
