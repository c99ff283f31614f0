"""Benchmark of preparing ImageNet images, against FFCV's DatasetWriter, litdata and MosaicML's MDS.

The sample's training JPEGs are repeated under other names. FFCV re-encodes every image; ours re-encodes those that it
shrinks, and keeps the coding of the others. litdata and MDS are given the bytes of the files, in chunks of 64 MiB,
their default; they take part if they are installed. Each writer has a process tree of its own. Time and CPU time are
from the call until the files are on disk, without imports; CPU time is that of all processes.
"""

import argparse
import importlib.util
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

from widemix.bench.sample import jpegs, link_repeatedly
from widemix.cgroups import usable_cpus
from widemix.data_prep.settings import PrepSettings
from widemix.formats.beton import open_beton
from widemix.progress_line import print_status

PEERS = {"litdata": "litdata", "streaming": "mosaicml-streaming"}  # modules, and the packages that hold them
VERSIONS = (
    "ffcv",
    "opencv-python",
    "pillow",
    "numpy",
    *(PEERS[name] for name in PEERS if importlib.util.find_spec(name)),
)
CHUNK = 64 << 20  # bytes of a file of litdata's and of MDS
QUALITY = 90
SIDE = 224  # pixels; of the crops that are compared


class Cost(NamedTuple):
    """The cost of one run, and the size of its files."""

    seconds: float
    cpu_seconds: float
    bytes: int


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per writer and image size. Raises `InputError` if the folder `--from` has no JPEGs."""
    files = jpegs(arguments.origin)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        named = link_repeatedly(files, folder / "images", arguments.samples)
        comparisons = [writers_of(size, folder / "images", named) for size in (512, 400)]
        comparisons[0] |= peers(named)
        return [row for writers in comparisons for row in rows_of(writers, folder, named, arguments.rounds)]


def writers_of(size: int, folder: Path, named: Sequence[Path]) -> dict[str, Callable[[Path], Cost]]:
    """The writers for one longest side in pixels, FFCV first. Each is called with a folder to write to."""
    plain, marked = (PrepSettings(max_size=size, quality=QUALITY, restart_markers=chosen) for chosen in (False, True))
    kept = "original coding kept" if size == 512 else "re-encoded"
    return {
        f"FFCV's DatasetWriter, {size} pixels": partial(by_ffcv, size, named),
        f"ours, {size} pixels, {kept}": partial(by_us, plain, folder),
        f"ours, {size} pixels, {kept}, restart markers": partial(by_us, marked, folder),
    }


def peers(named: Sequence[Path]) -> dict[str, Callable[[Path], Cost]]:
    """The writers of other libraries that keep the files' bytes; a line for each that is not installed."""
    writers = {
        "litdata": ("litdata's optimize, the files' bytes", partial(by_litdata, named)),
        "streaming": ("MosaicML's MDSWriter, the files' bytes", partial(by_mds, named)),
    }
    for module, package in PEERS.items():
        if not importlib.util.find_spec(module):
            print_status(f"{package} is not installed and left out")
            del writers[module]
    return dict(writers.values())


def rows_of(
    writers: dict[str, Callable[[Path], Cost]], folder: Path, named: Sequence[Path], rounds: int
) -> list[dict[str, Any]]:
    """One row per writer, by its cost in each round; the first is the peer of the others."""
    costs: dict[str, list[Cost]] = {name: [] for name in writers}
    loss: dict[str, float | None] = {}
    for _ in range(rounds):
        for name, write in writers.items():
            with tempfile.TemporaryDirectory(dir=folder) as out:
                costs[name].append(_in_process(write, Path(out)))
                if name not in loss:
                    beton = next(Path(out).rglob("*.beton"), None)
                    loss[name] = None if beton is None else round(psnr(beton, named), 2)
    peer = next(iter(writers))
    return [row_of(name, own, costs[peer], loss[name], len(named)) for name, own in costs.items()]


def row_of(name: str, own: list[Cost], peer: list[Cost], loss: float | None, count: int) -> dict[str, Any]:
    """Medians over rounds; ratios are the peer's cost to this one's, above 1 where this one is faster."""
    pairs = list(zip(own, peer, strict=True))
    return {
        "name": name,
        "images_per_s": round(statistics.median(count / cost.seconds for cost in own), 1),
        "images_per_cpu_s": round(statistics.median(count / cost.cpu_seconds for cost in own), 1),
        "time_ratio": round(statistics.median(b.seconds / a.seconds for a, b in pairs), 3),
        "ratio": round(statistics.median(b.cpu_seconds / a.cpu_seconds for a, b in pairs), 3),
        "bytes_ratio": round(own[0].bytes / peer[0].bytes, 3),
        "mib": round(own[0].bytes / 2**20, 1),
        "psnr_db": loss,
    }


def _in_process(write: Callable[[Path], Cost], out: Path) -> Cost:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(write, out).result()


def by_us(settings: PrepSettings, folder: Path, out: Path) -> Cost:
    """Prepare the images in a folder."""
    from widemix.data_prep.prepare import prepare

    return cost_of(lambda: prepare("image-folder", folder, out / "ours", settings), out)


def by_ffcv(size: int, named: Sequence[Path], out: Path) -> Cost:
    """Write the images with FFCV."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField("jpg", max_resolution=size, jpeg_quality=QUALITY), "label": IntField()}
    multiprocessing.set_start_method("fork", force=True)  # spawned workers would import FFCV again, 4 s each
    writer = DatasetWriter(str(out / "theirs.beton"), fields, num_workers=usable_cpus())
    return cost_of(lambda: writer.from_indexed_dataset(_Images(named)), out)


def by_litdata(named: Sequence[Path], out: Path) -> Cost:
    """Write the files' bytes with litdata."""
    for name in ("CACHE", "DATA_CACHE"):  # folders that it removes: by default `chunks` and `data` in that of all
        os.environ[f"DATA_OPTIMIZER_{name}_FOLDER"] = str(out / name)
    from litdata import optimize

    def write() -> None:
        options: dict[str, Any] = {"chunk_bytes": CHUNK, "num_workers": usable_cpus(), "start_method": "fork"}
        optimize(_sample, [str(file) for file in named], str(out / "litdata"), verbose=False, **options)

    return cost_of(write, out)


def by_mds(named: Sequence[Path], out: Path) -> Cost:
    """Write the files' bytes with MosaicML's MDS."""
    from streaming import MDSWriter

    def write() -> None:
        columns = {"image": "bytes", "label": "int"}
        with MDSWriter(out=str(out / "mds"), columns=columns, size_limit=CHUNK) as writer:
            for file in named:
                writer.write(_sample(file))

    return cost_of(write, out)


def _sample(file: str | Path) -> dict[str, Any]:
    return {"image": Path(file).read_bytes(), "label": 0}


class _Images:
    """The dataset that FFCV's writer reads: Pillow images with a label."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.open(self.files[index]).convert("RGB"), 0


def cost_of(work: Callable[[], Any], out: Path) -> Cost:
    """The cost of what writes to a folder, until its files are on disk, and their size."""
    os.sync()  # so that no writer pays for data of the one before
    started, used = time.perf_counter(), cpu_seconds()
    work()
    os.sync()  # ours has already flushed its file
    seconds, after = time.perf_counter() - started, cpu_seconds()
    return Cost(seconds, after - used, sum(path.stat().st_size for path in out.rglob("*") if path.is_file()))


def cpu_seconds() -> float:
    """CPU seconds of this process and its descendants, including those that have ended."""
    this = psutil.Process()
    return sum(sum(process.cpu_times()[:4]) for process in (this, *this.children(recursive=True)))


def psnr(path: Path, named: Sequence[Path]) -> float:
    """PSNR in decibels of crops of up to 100 stored images against the originals; 100 for equal pixels.

    A crop is the central square of 60 % of the shorter side, resized to 224 pixels.
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
