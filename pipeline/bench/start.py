"""Seconds from the start of a process to its first batch, ours against FFCV: with an empty cache, and again.

One batch of 50 real ImageNet JPEGs at 224 pixels. Every start is a new process; the first of each round has an empty
cache folder, the second the cache that the first has filled. FFCV caches nothing: its second start is like its first.
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
from typing import Any, NamedTuple

from widemix.bench.sample import jpegs, link_repeatedly, prepare
from widemix.processes import children_cpu_seconds
from widemix.progress_line import track

VERSIONS = ("torch", "ffcv", "numba")
SIDE, BATCH = 224, 50


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of `widemix bench start`."""
    files = jpegs(arguments.origin)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        link_repeatedly(files, folder / "images", max(BATCH, len(files)))
        prepare("image-folder", folder / "images", folder / "data", "--max-size=0")
        costs: dict[str, list[tuple[Cost, Cost]]] = {name: [] for name in STARTS}
        for turn in track(range(arguments.rounds), "rounds timed", arguments.rounds, "rounds"):
            for number, name in enumerate(STARTS):
                cache = folder / f"cache-{turn}-{number}"
                costs[name].append((_start(name, folder / "data", cache), _start(name, folder / "data", cache)))
        return [_row(name, own, next(iter(costs.values()))) for name, own in costs.items()]


class Cost(NamedTuple):
    """Time that one start took."""

    seconds: float
    cpu_seconds: float  # of all threads


def _start(name: str, data: Path, cache: Path) -> Cost:
    began, used = time.perf_counter(), children_cpu_seconds()
    command = [sys.executable, "-m", "widemix.bench.start", name, str(data)]
    subprocess.run(command, env=os.environ | {"XDG_CACHE_HOME": str(cache)}, check=True)
    return Cost(time.perf_counter() - began, children_cpu_seconds() - used)


def _row(name: str, own: list[tuple[Cost, Cost]], peer: list[tuple[Cost, Cost]]) -> dict[str, Any]:
    """Return medians over rounds; `ratio` is the CPU time of the peer's second start over that of ours."""
    row: dict[str, Any] = {"name": name}
    for number, start in enumerate(("first", "second")):
        row[f"{start}_s"] = round(statistics.median(costs[number].seconds for costs in own), 2)
        row[f"{start}_cpu_s"] = round(statistics.median(costs[number].cpu_seconds for costs in own), 2)
    pairs = zip(own, peer, strict=True)
    row["ratio"] = round(statistics.median(b.cpu_seconds / a.cpu_seconds for (_, a), (_, b) in pairs), 2)
    return row


def _ffcv(folder: Path):
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    image = [RandomResizedCropRGBImageDecoder((SIDE, SIDE)), RandomHorizontalFlip(), ToTensor()]
    pipelines = {"image": image, "label": [IntDecoder(), ToTensor()], "segments": None}
    return next(iter(Loader(str(folder / "train.beton"), BATCH, num_workers=1, pipelines=pipelines)))


def _ours(folder: Path, policy: str | None):
    from widemix.bench.timing import data_of, training_loader
    from widemix.recipe.augment import AugmentSection

    augment = AugmentSection(auto_augment=policy, re_prob=0.25 if policy else 0.0)
    with training_loader(data_of(folder, SIDE), augment, BATCH).batches(0) as batches:
        return next(batches)


# Each returns its first batch.
STARTS: dict[str, Callable[[Path], Any]] = {
    "FFCV, crop and flip": _ffcv,
    "ours, crop and flip": lambda folder: _ours(folder, None),
    "ours, crop, flip, RandAugment and erasing": lambda folder: _ours(folder, "rand-m9-mstd0.5-inc1"),
}

if __name__ == "__main__":
    STARTS[sys.argv[1]](Path(sys.argv[2]))
    os._exit(0)  # at the first batch: unloading torch takes 0.7 s more
