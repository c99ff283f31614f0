"""Training images of the full ImageNet recipe, ours against timm's and torchvision's.

Random-resized crop to 224, flip, rand-m9-mstd0.5-inc1, normalised float32 tensor, random erasing with noise at
probability 0.25. From files to tensors, on one core. Needs real ImageNet JPEGs in a folder of classes; if they are
few, each is used under several names.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from widemix.bench.loading import decoder
from widemix.bench.sample import jpegs, link_repeatedly, prepare
from widemix.bench.timing import Contestant, Epochs, compare_loaders, data_of, training_loader
from widemix.data.decode import Decoder
from widemix.data.split import open_split
from widemix.formats.beton import open_beton
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import IMAGENET_MEAN, IMAGENET_STD

VERSIONS = ("torch", "torchvision", "timm", "pillow", "numba")
POLICY = "rand-m9-mstd0.5-inc1"
SIDE, BATCH = 224, 25
ROUND = 500  # images: an epoch of 20 batches, since each epoch starts new threads
TIMM = "timm + Pillow, original files"


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of `widemix bench augment`."""
    files = jpegs(arguments.origin)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images"
        links = link_repeatedly(files, images, len(files) * max(1, ROUND // len(files)))
        return compare_loaders(contestants(links, images, Path(folder)), arguments.rounds, peer=TIMM)


def contestants(files: Sequence[Path], origin: Path, folder: Path) -> dict[str, Contestant]:
    """All rows, by name. files: below `origin`, which is prepared in `folder`."""
    for name, options in (
        ("original", ("--max-size=0", "--no-restart-markers")),
        ("segments", ("--max-size=0",)),
        ("coefficients", ("--max-size=0", "--encoding=coefficients")),
        ("small", ("--max-size=400",)),
    ):
        prepare("image-folder", origin, folder / name, *options)
    original, segments, small = folder / "original", folder / "segments", folder / "small"
    coefficients = folder / "coefficients"
    return {
        TIMM: _timm(files),
        "torchvision v2, original files": _torchvision(files),
        "ours, original bytes": _loader(original, POLICY, 0.25),
        "ours, original bytes, without policy": _loader(original, None, 0.25),
        "ours, original bytes, crop and flip alone": _loader(original, None, 0.0),
        "our decoding with timm's policy on Pillow": decoder(original, 1, False, _timm_policy()),
        "ours, restart markers": _loader(segments, POLICY, 0.25),
        "ours, restart markers, crop and flip alone": _loader(segments, None, 0.0),
        "ours, coefficients": _loader(coefficients, POLICY, 0.25),
        "ours, coefficients, crop and flip alone": _loader(coefficients, None, 0.0),
        "ours, prepared with --max-size 400": _loader(small, POLICY, 0.25),
        "ours, prepared with --max-size 400, crop and flip alone": _loader(small, None, 0.0),
        "decoding to uint8 alone, original bytes": decoder(original, 1, False),
        "entropy decoding alone, original bytes, whole": _entropy_decoder(original),
    }


def _loader(folder: Path, policy: str | None, re_prob: float) -> Epochs:
    augment = AugmentSection(auto_augment=policy, re_prob=re_prob, re_mode="pixel")
    return Epochs([training_loader(data_of(folder, SIDE), augment, BATCH)])


def _entropy_decoder(folder: Path) -> Contestant:
    """Decode the last pixel of each image: of what precedes it only the entropy coding is read."""
    beton = open_split(data_of(folder, SIDE), "train", open_beton)
    decoder, samples = Decoder(beton), np.arange(len(beton))
    ones = np.ones_like(samples)
    boxes = np.stack([beton.height - 1, beton.width - 1, ones, ones, 0 * ones], axis=1)
    images = np.empty((len(beton), 1, 1, 3), np.uint8)

    def process(number: int) -> int:
        decoder.read(samples, boxes, samples < 0, images, threads=1)
        return len(samples)

    return process


def _timm_policy() -> Callable[[np.ndarray], object]:
    """timm's policy on Pillow images, its normalisation and erasing, of decoded images."""
    transform = timm_transform().transforms[2:]

    def change(images: np.ndarray) -> None:
        for image in images:
            augmented = Image.fromarray(image)
            for step in transform:
                augmented = apply(step, augmented)

    return change


def _timm(files: Sequence[Path]) -> Contestant:
    transform = timm_transform()

    def process(number: int) -> int:
        made = [apply(transform, Image.open(file).convert("RGB")) for file in files]
        return len(made)

    return process


def timm_transform():
    """timm's transform of the full recipe."""
    from timm.data import create_transform

    return create_transform(
        SIDE,
        is_training=True,
        auto_augment=POLICY,
        re_prob=0.25,
        re_mode="pixel",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def apply(transform, image):
    """Apply a transform; retry when timm asks Pillow 13 for 0 bits and fails, as it does for one image in 600."""
    while True:
        try:
            return transform(image)
        except ValueError:
            continue


def _torchvision(files: Sequence[Path]) -> Contestant:
    from torchvision.io import ImageReadMode, decode_jpeg, read_file

    transform = torchvision_transform()

    def process(number: int) -> int:
        return len([transform(decode_jpeg(read_file(str(file)), ImageReadMode.RGB)) for file in files])

    return process


def torchvision_transform():
    """torchvision's nearest to the full recipe: it has no policy whose magnitude varies, nor erasing with noise."""
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.RandomResizedCrop(SIDE, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandAugment(num_ops=2, magnitude=9),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
            v2.RandomErasing(0.25),
        ]
    )
