"""Seconds from the start of a process to its first batch, ours against FFCV: with nothing compiled, and again.

One batch of 50 real ImageNet JPEGs at 224 pixels. Every start has a process of its own; the first of each round has
an empty cache folder, the second what the first left there. FFCV keeps nothing: its second start is like its first.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep.prepare import prepare
from data_prep.settings import PrepSettings
from pipeline.errors import InputError

VERSIONS = ("torch", "ffcv", "numba")
SIDE, BATCH = 224, 50


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if len(list((arguments.origin / "train").glob("*/*.JPEG"))) < BATCH:
        raise InputError(f"--from {arguments.origin}: has no {BATCH} training JPEGs (train/<class>/*.JPEG)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare("imagenet", arguments.origin, folder / "data", PrepSettings(max_size=0))
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in STARTS}
        for turn in range(arguments.rounds):
            for number, way in enumerate(STARTS):
                cache = folder / f"cache-{turn}-{number}"
                times[way].append((_start(way, folder / "data", cache), _start(way, folder / "data", cache)))
        return [_row(way, found, next(iter(times.values()))) for way, found in times.items()]


def _start(way: str, data: Path, cache: Path) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "pipeline.bench.start", way, str(data)]
    subprocess.run(command, env=os.environ | {"XDG_CACHE_HOME": str(cache)}, check=True)
    return time.perf_counter() - began


def _row(name: str, found: list[tuple[float, float]], peer: list[tuple[float, float]]) -> dict[str, Any]:
    """Medians over rounds; the ratio is that of the peer's second start to this one's."""
    return {
        "name": name,
        "first_s": round(statistics.median(first for first, _ in found), 2),
        "second_s": round(statistics.median(second for _, second in found), 2),
        "ratio": round(statistics.median(b / a for (_, a), (_, b) in zip(found, peer, strict=True)), 2),
    }


def _ffcv(folder: Path) -> None:
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    image = [RandomResizedCropRGBImageDecoder((SIDE, SIDE)), RandomHorizontalFlip(), ToTensor()]
    pipelines = {"image": image, "label": [IntDecoder(), ToTensor()], "segments": None}
    next(iter(Loader(str(folder / "train.beton"), BATCH, num_workers=1, pipelines=pipelines)))


def _ours(folder: Path, policy: str | None) -> None:
    import torch

    from pipeline.data.loader import TrainLoader
    from pipeline.recipe.augment import AugmentSection
    from pipeline.recipe.data import DataSection
    from pipeline.topology import Topology

    data = DataSection(path=str(folder), num_classes=1000, image_size=SIDE, workers=1)
    augment = AugmentSection(auto_augment=policy, re_prob=0.25 if policy else 0.0)
    with TrainLoader(data, augment, BATCH, 1, 0, Topology(0, 1, 0, 1, torch.device("cpu"))).batches(0) as batches:
        next(batches)


STARTS: dict[str, Callable[[Path], None]] = {
    "FFCV, crop and flip": _ffcv,
    "ours, crop and flip": lambda folder: _ours(folder, None),
    "ours, crop, flip, RandAugment and erasing": lambda folder: _ours(folder, "rand-m9-mstd0.5-inc1"),
}

if __name__ == "__main__":
    STARTS[sys.argv[1]](Path(sys.argv[2]))
