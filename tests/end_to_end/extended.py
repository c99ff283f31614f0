"""`widemix` with a model family, an optimizer, an operation and a data source of somebody else's.

Run as `python -m tests.end_to_end.extended COMMAND ...`.
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from tests.forks import be_widemix
from widemix.cli import main
from widemix.data.augment.registry import LINEAR, MagnitudeMap, register_operation
from widemix.data_prep.samples import Dataset, PixelArrays
from widemix.data_prep.sources import register_source
from widemix.models.families import register as register_family
from widemix.models.section import ModelSection
from widemix.optim.section import OptimizerSpec
from widemix.optim.section import register as register_optimizer
from widemix.section import Positive, key


class Pixels(nn.Module):
    """One hidden layer over all pixels: images [B, 3, H, W] -> logits [B, num_classes]."""

    def __init__(self, side: int, width: int, num_classes: int):
        super().__init__()
        self.fc = nn.Linear(3 * side**2, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.head(self.fc(x.flatten(1)).relu())


class PixelsSection(ModelSection):
    """The keys of `Pixels`."""

    kind: Literal["pixels"] = key(..., "pixels: one hidden layer over all pixels")
    width: Positive = key(..., "units of the hidden layer")

    def build(self, image_size: int, num_classes: int) -> Any:
        return Pixels(image_size, self.width, num_classes)


def build_rprop(groups: list[dict[str, Any]], section: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(groups, lr=section.lr)


def shift(image: np.ndarray, argument: float) -> None:
    """Roll the image's columns."""
    image[:] = np.roll(image, round(argument), axis=1)


def stripes(origin: None) -> Dataset:
    """Bright columns on the left or on the right."""
    numbers = np.random.default_rng(0)
    labels = np.arange(64) % 2
    pixels = numbers.integers(0, 60, (64, 8, 8, 3), np.uint8)
    pixels[labels == 0, :, :4] += 150
    pixels[labels == 1, :, 4:] += 150
    splits = {"train": PixelArrays("train", pixels[:48], labels[:48])}
    return Dataset(("left", "right"), splits | {"test": PixelArrays("test", pixels[48:], labels[48:])})


def be_extended(*words: str) -> None:
    """This command in a fork."""
    register_all()
    be_widemix(*words)


def register_all() -> None:
    register_family(PixelsSection)
    register_optimizer("rmsprop", OptimizerSpec(build_rprop, "RMSprop", states=1))
    register_operation("Shift", shift, MagnitudeMap(LINEAR, 2), sets=("ours",))
    register_source("stripes", "tests.end_to_end.extended.stripes", "striped images", takes_origin=False)


if __name__ == "__main__":
    register_all()
    main()
