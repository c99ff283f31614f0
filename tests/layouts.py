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


def mnist(folder: Path) -> None:
    for name, count in (("train", TRAIN), ("t10k", TEST)):
        images, labels = noise(count, 28, 28).tobytes(), noise(count, below=10).tobytes()
        for kind, head, body in (
            ("images-idx3", struct.pack(">4i", 2051, count, 28, 28), images),
            ("labels-idx1", struct.pack(">2i", 2049, count), labels),
        ):
            (folder / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + body))


def cifar10(folder: Path) -> None:
    pixels = noise(TRAIN, 3, 32, 32)
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        (folder / name).write_bytes(_labelled(pixels, labels=1))
    _names(folder / "batches.meta.txt", 10)


def cifar100(folder: Path) -> None:
    for name in ("train.bin", "test.bin"):
        (folder / name).write_bytes(_labelled(noise(TRAIN, 3, 32, 32), labels=2))
    _names(folder / "fine_label_names.txt", 100)
    _names(folder / "coarse_label_names.txt", 20)


def _labelled(pixels: np.ndarray, labels: int) -> bytes:
    """Records of `labels` label bytes and the pixels of an image."""
    return np.hstack([noise(len(pixels), labels, below=10), pixels.reshape(len(pixels), -1)]).tobytes()


def _names(path: Path, count: int) -> None:
    path.write_text("".join(f"class{i}\n" for i in range(count)))


def stl10(folder: Path) -> None:
    for name, count in (("train", TRAIN), ("test", TEST)):
        (folder / f"{name}_X.bin").write_bytes(noise(count, 3, 96, 96).tobytes())
        (folder / f"{name}_y.bin").write_bytes((noise(count, below=10) + 1).tobytes())


def svhn(folder: Path) -> None:
    pixels, labels = noise(32, 32, 3, TRAIN + TEST), noise(TRAIN + TEST, 1, below=10) + 1
    for name, part in (("train", slice(TRAIN)), ("test", slice(TRAIN, None))):
        savemat(folder / f"{name}_32x32.mat", {"X": pixels[..., part], "y": labels[part]})


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
