"""Several views of each image from one decoding, against one loader for each view.

Real ImageNet JPEGs in whole epochs on one decoding thread. DINO's ten crops with its augmentation, and with crop and
flip alone; and two equal crops, as of MoCo.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from widemix.bench.sample import jpegs, link_repeatedly, prepare
from widemix.bench.timing import Contestant, compare_loaders
from widemix.data.loader import TrainLoader
from widemix.data.views import View
from widemix.distributed.topology import Topology
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection
from widemix.recipe.train import TrainSection

VERSIONS = ("torch", "numba", "numpy")
BATCH = 32
JITTER = {"color_jitter": (0.4, 0.4, 0.2, 0.1), "color_jitter_prob": 0.8, "grayscale_prob": 0.2}
GLOBAL, LOCAL = {"scale": (0.4, 1.0)}, {"scale": (0.05, 0.4)}
DINO = [
    (224, {**GLOBAL, **JITTER, "gaussian_blur_prob": 1.0}),
    (224, {**GLOBAL, **JITTER, "gaussian_blur_prob": 0.1, "solarize_prob": 0.2}),
    *[(96, {**LOCAL, **JITTER, "gaussian_blur_prob": 0.5})] * 8,
]
CASES: dict[str, Sequence[tuple[int, dict[str, Any]]]] = {
    "DINO: 2 of 224, 8 of 96": DINO,
    "crop and flip alone: 2 of 224, 8 of 96": [(224, GLOBAL)] * 2 + [(96, LOCAL)] * 8,
    "crop and flip alone: 2 of 224": [(224, {})] * 2,
}


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of `widemix bench views`: samples per CPU second, with all their views."""
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        files, images, prepared = jpegs(arguments.origin), Path(name) / "images", Path(name) / "prepared"
        link_repeatedly(files, images, max(BATCH, len(files)))
        prepare("image-folder", images, prepared, "--max-size=0")
        for case, kinds in CASES.items():
            data: dict[str, Any] = {"path": str(prepared), "num_classes": 1000, "workers": 1}
            views = [(DataSection(**data, image_size=side), AugmentSection(**keys)) for side, keys in kinds]
            separate, together = f"{case}; a loader for each view", f"{case}; one loader"
            contestants = {separate: _separate(views), together: _together(views)}
            rows += compare_loaders(contestants, arguments.rounds, peer=separate)
    return rows


def _loader(view: View, views: Sequence[View] = ()) -> TrainLoader:
    train = TrainSection(epochs=1, global_batch=BATCH)
    return TrainLoader(*view, train, Topology(0, 1, 0, 1, torch.device("cpu")), views=views)


def _samples(loader: TrainLoader, epoch: int) -> int:
    with loader.batches(epoch) as batches:
        return sum(len(batch) for batch in batches)


def _separate(views: Sequence[View]) -> Contestant:
    loaders = [_loader(view) for view in views]
    return lambda number: sum(_samples(loader, number) for loader in loaders) // len(loaders)


def _together(views: Sequence[View]) -> Contestant:
    loader = _loader(views[0], views)
    return lambda number: _samples(loader, number)
