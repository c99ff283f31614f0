"""Prepared images of classes of unequal size, which a small network can tell apart for the most part."""

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

import widemix

# Of a recipe like base/own_images: a network and a schedule for such images.
TINY = {
    "data.image_size": "8",
    "data.workers": "1",
    "augment.color_jitter": "[0, 0, 0, 0]",
    "model.patch_size": "2",
    "model.channels": "16",
    "model.depth": "1",
    "schedule.name": "constant",
    "schedule.warmup_epochs": "0",
    "eval.every_epochs": "1",
    "log.tensorboard": "false",
    "log.images": "0",
}


def options_of(keys: Mapping[str, object]) -> list[str]:
    """Keys of a recipe as words of a command."""
    return [word for name, value in keys.items() for word in (f"--{name}", str(value))]


def prepare_unequal(target: Path, splits: Mapping[str, Mapping[str, int]], side: int = 8) -> Path:
    """Prepare so many images of each class in each split: noise, with a bar whose place is the class's number."""
    numbers, pairs = np.random.RandomState(0), {}
    for split, counts in splits.items():
        labels = np.repeat(np.arange(len(counts)), [*counts.values()])
        images = numbers.randint(0, 160, (len(labels), side, side, 3)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[:, label * side // len(counts)] += 60
        names = [[*counts][label] for label in labels]
        pairs[split] = [(png(image), name) for image, name in zip(images, names, strict=True)]
    widemix.prepare(pairs, target, processes=1)
    return target


def png(image: np.ndarray | int) -> bytes:
    """The file of an image, uint8 [H, W, 3]; of a number, one of noise."""
    pixels = np.random.RandomState(image).randint(0, 256, (8, 8, 3)) if isinstance(image, int) else image
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()
