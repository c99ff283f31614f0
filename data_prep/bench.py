"""Writing ImageNet's pictures to a .beton: ours against FFCV's DatasetWriter, each in a process tree of its own.

The sample's training JPEGs under as many names as asked for. FFCV encodes every picture anew; ours does where it
shrinks, and elsewhere keeps the original coding. Time and CPU time are from the call until the file is on disk,
imports before it not counted; CPU time is that of all processes together.
"""

import argparse
import io
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from PIL import Image

from data_prep.settings import PrepSettings
from pipeline.bench.sample import link_repeatedly
from pipeline.cgroups import usable_cpus
from pipeline.errors import InputError
from pipeline.formats.beton import open_beton

VERSIONS = ("ffcv", "opencv-python", "pillow", "numpy")
QUALITY = 90
SIDE = 224  # of the crops that are compared


class Cost(NamedTuple):
    seconds: float
    cpu_seconds: float
    bytes: int


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    files = sorted((arguments.origin / "train").glob("*/*.JPEG"))
    if not files:
        raise InputError(f"--from {arguments.origin}: has no training JPEGs (train/<class>/*.JPEG)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        named = link_repeatedly(files, folder / "pictures", arguments.samples)
        contests = [_contest(size, folder / "pictures", named) for size in (512, 400)]
        return [row for contest in contests for row in _rows(contest, folder, named, arguments.rounds)]


def _contest(size: int, folder: Path, named: Sequence[Path]) -> dict[str, Callable[[Path], Cost]]:
    """The contestants at one longest side, FFCV first, each called with a folder to write to."""
    plain, marked = (PrepSettings(max_size=size, quality=QUALITY, restart_markers=chosen) for chosen in (False, True))
    kept = "original coding kept" if size == 512 else "encoded anew"
    return {
        f"FFCV's DatasetWriter, {size} pixels": partial(_ffcv, size, named),
        f"ours, {size} pixels, {kept}": partial(_ours, plain, folder),
        f"ours, {size} pixels, {kept}, restart markers": partial(_ours, marked, folder),
    }


def _rows(
    contest: dict[str, Callable[[Path], Cost]], folder: Path, named: Sequence[Path], rounds: int
) -> list[dict[str, Any]]:
    costs: dict[str, list[Cost]] = {name: [] for name in contest}
    loss: dict[str, float] = {}
    for _ in range(rounds):
        for name, write in contest.items():
            with tempfile.TemporaryDirectory(dir=folder) as out:
                costs[name].append(_in_a_process(write, Path(out)))
                if name not in loss:
                    loss[name] = _psnr(next(Path(out).rglob("*.beton")), named)
    peer = next(iter(contest))
    return [_row(name, found, costs[peer], loss[name], len(named)) for name, found in costs.items()]


def _row(name: str, found: list[Cost], peer: list[Cost], loss: float, count: int) -> dict[str, Any]:
    """Medians over rounds; ratios are the peer's cost to this one's, above 1 where this one is faster."""
    pairs = list(zip(found, peer, strict=True))
    return {
        "name": name,
        "images_per_s": round(statistics.median(count / cost.seconds for cost in found), 1),
        "images_per_cpu_s": round(statistics.median(count / cost.cpu_seconds for cost in found), 1),
        "time_ratio": round(statistics.median(b.seconds / a.seconds for a, b in pairs), 3),
        "ratio": round(statistics.median(b.cpu_seconds / a.cpu_seconds for a, b in pairs), 3),
        "bytes_ratio": round(found[0].bytes / peer[0].bytes, 3),
        "mib": round(found[0].bytes / 2**20, 1),
        "psnr_db": round(loss, 2),
    }


def _in_a_process(write: Callable[[Path], Cost], out: Path) -> Cost:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(write, out).result()


def _ours(settings: PrepSettings, folder: Path, out: Path) -> Cost:
    from data_prep.prepare import prepare

    return _cost(lambda: prepare("imagenet", folder, out / "ours", settings), out)


def _ffcv(size: int, named: Sequence[Path], out: Path) -> Cost:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField("jpg", max_resolution=size, jpeg_quality=QUALITY), "label": IntField()}
    multiprocessing.set_start_method("fork", force=True)  # FFCV's workers would import it anew, for 4 s each
    writer = DatasetWriter(str(out / "theirs.beton"), fields, num_workers=usable_cpus())
    return _cost(lambda: writer.from_indexed_dataset(_Pictures(named)), out)


class _Pictures:
    """What FFCV's writer reads: pictures by number, as Pillow's, with a label."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.open(self.files[index]).convert("RGB"), 0


def _cost(work: Callable[[], Any], out: Path) -> Cost:
    os.sync()  # nobody pays for what the one before left to be written
    started, used = time.perf_counter(), _cpu_seconds()
    work()
    os.sync()  # which ours has seen to by itself
    seconds, after = time.perf_counter() - started, _cpu_seconds()
    return Cost(seconds, after - used, sum(path.stat().st_size for path in out.rglob("*.beton")))


def _cpu_seconds() -> float:
    """Of this process and all below it, those that have ended too."""
    here = psutil.Process()
    return sum(sum(process.cpu_times()[:4]) for process in (here, *here.children(recursive=True)))


def _psnr(path: Path, named: Sequence[Path]) -> float:
    """Decibels between a crop of the stored pictures and of the originals, by the mean error of up to 100 of them.

    The central square of 60 % of the shorter side, brought to 224 pixels as training would; 100 for equal pixels.
    """
    beton = open_beton(path)
    errors = []
    for sample in range(0, len(beton), max(1, len(beton) // 100)):
        data = beton.bytes[beton.offset[sample] :][: beton.size[sample]].tobytes()
        stored, source = (_crop(Image.open(file)) for file in (io.BytesIO(data), named[sample]))
        errors.append(float(np.mean((stored - source) ** 2)))
    error = statistics.fmean(errors)
    return 100.0 if error == 0 else 10 * math.log10(255**2 / error)


def _crop(image: Image.Image) -> np.ndarray:
    side = 0.6 * min(image.size)
    left, top = ((pixels - side) / 2 for pixels in image.size)
    box = (left, top, left + side, top + side)
    resized = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR, box)
    return np.asarray(resized, np.float64)
