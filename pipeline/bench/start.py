"""Seconds from the start of a process to its first batch, ours against FFCV: with nothing compiled, and again.

One batch of 50 real ImageNet JPEGs at 224 pixels. Every start has a process of its own; the first of each round has
an empty cache folder, the second what the first left there. FFCV keeps nothing: its second start is like its first.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.bench.sample import prepare
from pipeline.errors import InputError

VERSIONS = ("torch", "ffcv", "numba")
SIDE, BATCH = 224, 50


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if len(list((arguments.origin / "train").glob("*/*.JPEG"))) < BATCH:
        raise InputError(f"--from {arguments.origin}: has no {BATCH} training JPEGs (train/<class>/*.JPEG)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare("imagenet", arguments.origin, folder / "data", "--max-size=0")
        costs: dict[str, list[tuple[Cost, Cost]]] = {way: [] for way in STARTS}
        for turn in range(arguments.rounds):
            for number, way in enumerate(STARTS):
                cache = folder / f"cache-{turn}-{number}"
                costs[way].append((_start(way, folder / "data", cache), _start(way, folder / "data", cache)))
        return [_row(way, found, next(iter(costs.values()))) for way, found in costs.items()]


class Cost(NamedTuple):
    seconds: float
    cpu_seconds: float  # of all threads


def _start(way: str, data: Path, cache: Path) -> Cost:
    began, used = time.perf_counter(), _children()
    command = [sys.executable, "-m", "pipeline.bench.start", way, str(data)]
    subprocess.run(command, env=os.environ | {"XDG_CACHE_HOME": str(cache)}, check=True)
    return Cost(time.perf_counter() - began, _children() - used)


def _children() -> float:
    """CPU seconds of the processes started so far, those that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _row(name: str, found: list[tuple[Cost, Cost]], peer: list[tuple[Cost, Cost]]) -> dict[str, Any]:
    """Medians over rounds; the ratio is that of the peer's second start to this one's, in CPU time."""
    row: dict[str, Any] = {"name": name}
    for number, start in enumerate(("first", "second")):
        row[f"{start}_s"] = round(statistics.median(costs[number].seconds for costs in found), 2)
        row[f"{start}_cpu_s"] = round(statistics.median(costs[number].cpu_seconds for costs in found), 2)
    pairs = zip(found, peer, strict=True)
    row["ratio"] = round(statistics.median(b.cpu_seconds / a.cpu_seconds for (_, a), (_, b) in pairs), 2)
    return row


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
    from pipeline.distributed.topology import Topology
    from pipeline.recipe.augment import AugmentSection
    from pipeline.recipe.data import DataSection
    from pipeline.recipe.train import TrainSection

    data = DataSection(path=str(folder), num_classes=1000, image_size=SIDE, workers=1)
    augment = AugmentSection(auto_augment=policy, re_prob=0.25 if policy else 0.0)
    train, topology = TrainSection(epochs=1, global_batch=BATCH), Topology(0, 1, 0, 1, torch.device("cpu"))
    with TrainLoader(data, augment, train, topology).batches(0) as batches:
        next(batches)


STARTS: dict[str, Callable[[Path], None]] = {
    "FFCV, crop and flip": _ffcv,
    "ours, crop and flip": lambda folder: _ours(folder, None),
    "ours, crop, flip, RandAugment and erasing": lambda folder: _ours(folder, "rand-m9-mstd0.5-inc1"),
}

if __name__ == "__main__":
    STARTS[sys.argv[1]](Path(sys.argv[2]))
    os._exit(0)  # at the first batch: taking torch down again takes 0.7 s more
