"""A few random samples of every source in its official layout."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

TRAIN, TEST = 8, 5  # samples of each split


def noise(*shape: int, below: int = 256) -> np.ndarray:
    return np.random.RandomState(0).randint(0, below, shape).astype(np.uint8)


def two_classes(folder: Path) -> None:
    """JPEGs of many sizes in two classes: 53 to train on, 17 to evaluate on."""
    numbers = np.random.RandomState(0)
    for i in range(70):
        path = folder / ("train" if i < 53 else "val") / f"class{i % 2}" / f"{i:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = numbers.randint(20, 90, 2)
        small = numbers.randint(0, 256, (5, 5, 3)).astype(np.uint8)
        Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(path, quality=95)


def imagenet(folder: Path) -> None:
    """Class folders of train and val."""
    for split, count in (("train", TRAIN), ("val", TEST)):
        _class_folders(folder / split, count)


def imagenet21k(folder: Path) -> None:
    """Class folders without splits."""
    _class_folders(folder, TRAIN + TEST)


def _class_folders(folder: Path, count: int) -> None:
    for i in range(count):
        path = folder / f"n0000000{i % 2}" / f"{i}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(40, 50, 3)).save(path)


# Arrays: by default random images [n, side, side, 3] and their labels.
Data = dict[str, tuple[np.ndarray, np.ndarray]]


def arrays(side: int, classes: int = 10, train: int = TRAIN) -> Data:
    return {
        name: (noise(count, side, side, 3), noise(count, below=classes))
        for name, count in (("train", train), ("test", TEST))
    }


def planes(images: np.ndarray, by_columns: bool = False) -> np.ndarray:
    """The red, then green, then blue values of each image, row by row (or column by column)."""
    return images.transpose(0, 3, 2, 1) if by_columns else images.transpose(0, 3, 1, 2)


def mnist(folder: Path, data: Data | None = None, suffix: str = ".gz", other: str = "") -> None:
    """other: the name of a file that is compressed though its name does not say so, or the opposite."""
    for prefix, (images, labels) in zip(("train", "t10k"), (data or arrays(28)).values(), strict=True):
        for name, array in ((f"{prefix}-images-idx3-ubyte", images[..., 0]), (f"{prefix}-labels-idx1-ubyte", labels)):
            body = (
                struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
            )
            packed = gzip.compress(body) if bool(suffix) != (name == other) else body
            (folder / (name + suffix)).write_bytes(packed)


def batches(data: Data) -> Data:
    """CIFAR-10's five of train, and that of the test."""
    parts = zip(*(np.array_split(column, 5) for column in data["train"]), strict=True)
    return {f"data_batch_{i}": part for i, part in enumerate(parts, 1)} | {"test_batch": data["test"]}


def records(images: np.ndarray, *labels: np.ndarray) -> bytes:
    return np.column_stack([*labels, planes(images).reshape(len(images), -1)]).astype(np.uint8).tobytes()


def cifar10(folder: Path, data: Data | None = None) -> None:
    """The binary version."""
    for name, part in batches(data or arrays(32, train=40)).items():
        (folder / f"{name}.bin").write_bytes(records(*part))
    (folder / "batches.meta.txt").write_text("".join(f"class{i}\n" for i in range(10)) + "\n")


def cifar100(folder: Path, data: Data | None = None) -> None:
    """The binary version."""
    for name, (images, fine) in (data or arrays(32, 100)).items():
        (folder / f"{name}.bin").write_bytes(records(images, fine * 0 + 3, fine))
    (folder / "fine_label_names.txt").write_text("\n".join(f"class{i}" for i in range(100)))


def stl10(folder: Path, data: Data | None = None) -> None:
    for name, (images, labels) in (data or arrays(96)).items():
        (folder / f"{name}_X.bin").write_bytes(planes(images, by_columns=True).tobytes())
        (folder / f"{name}_y.bin").write_bytes((labels + 1).astype(np.uint8).tobytes())


def svhn(folder: Path, data: Data | None = None, compress: bool = False, kind: type = np.uint8) -> None:
    for name, (images, labels) in (data or arrays(32)).items():
        matrix = {"X": images.transpose(1, 2, 3, 0), "y": np.where(labels, labels, 10).astype(kind)[:, None]}
        savemat(folder / f"{name}_32x32.mat", matrix, do_compression=compress)


def mnli(folder: Path) -> None:
    """Pairs of sentences, and a vocabulary."""
    for split, count in (("train", TRAIN), ("dev_matched", TEST)):
        rows = [f"{'neutral' if i % 2 else 'entailment'}\tsome people eat\tpeople eat {i}" for i in range(count)]
        lines = ["gold_label\tsentence1\tsentence2", *rows]
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "some", "people", "eat", *map(str, range(10))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")


def table(folder: Path) -> None:
    """Images with two numbers each to predict, in a table."""
    rows = ["path,split,one,other"]
    for i in range(TRAIN + TEST):
        Image.fromarray(noise(40, 50, 3)).save(folder / f"{i}.jpg")
        rows.append(f"{i}.jpg,{'train' if i < TRAIN else 'test'},{i / 7},{i * i}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")


# By the name of the prepared folder in recipes: the source for `widemix prep`, and what writes its input.
LAYOUTS: dict[str, tuple[str, Callable[[Path], None] | None]] = {
    "digits": ("digits", None),
    "imagenet": ("imagenet", imagenet),
    "imagenet21k": ("imagenet", imagenet21k),
    "mnist": ("mnist", mnist),
    "cifar10": ("cifar10", cifar10),
    "cifar100": ("cifar100", cifar100),
    "stl10": ("stl10", stl10),
    "svhn": ("svhn", svhn),
    "mnli": ("mnli", mnli),
    "far-pairs": ("far-pairs", None),
}
