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
from widemix.bench.timing import Contestant, Epochs, compare_loaders, data_of, training_loader
from widemix.recipe.augment import AugmentSection

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
        for case in CASES:
            pair = contestants(case, prepared)
            rows += compare_loaders(pair, arguments.rounds, peer=next(iter(pair)))
    return rows


def contestants(case: str, prepared: Path) -> dict[str, Contestant]:
    """Both ways of a case by name, that with a loader for each view first."""
    views = [(data_of(prepared, side), AugmentSection(**keys)) for side, keys in CASES[case]]
    return {
        f"{case}; a loader for each view": Epochs([training_loader(*view, BATCH) for view in views]),
        f"{case}; one loader": Epochs([training_loader(*views[0], BATCH, views)]),
    }
