"""Loading without an augmentation policy, ours against other libraries: crop to 224, resize, flip.

JPEGs, each under several names, in whole epochs on one thread and on more. Which library is the fastest may change
between one and many: each is timed at each number of threads, each time in a new process, in random order. Rows with
"uint8" leave the images as they are; the others normalise to float32.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from widemix.bench.loading import FFCV, METHODS, PREPARED, TIMM, decoder
from widemix.bench.sample import jpegs, link_repeatedly, prepare
from widemix.bench.timing import percent_longer
from widemix.cgroups import usable_cpus
from widemix.errors import InputError, RunError, install_extra
from widemix.progress_line import ProgressLine
from widemix.terminal import print

VERSIONS = ("torch", "torchvision", "timm", "pillow", *(["ffcv"] if find_spec("ffcv") else []), "numba", "numpy")
Timing = dict[str, float]  # of one process, as widemix.bench.loading prints it


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of `widemix bench loader`: one for each method and number of threads."""
    files, threads = jpegs(arguments.origin), arguments.threads or powers_of_two(usable_cpus())
    if most := [number for number in threads if number > usable_cpus()]:
        raise InputError(f"--threads {most[0]}: this process may use {usable_cpus()} CPUs")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        link_repeatedly(files, folder / "images", arguments.samples)
        for kind, option in PREPARED.items():
            prepare("image-folder", folder / "images", folder / kind, "--max-size=0", option)
        names = [name for name in METHODS if is_installed(name)]
        timings = _time_all(names, folder, threads, arguments.rounds)
        torch.set_num_threads(1)
        prices = {
            name: checksums_percent(folder / method.decodes, arguments.rounds)
            for name, method in METHODS.items()
            if method.decodes
        }
    peer = FFCV if FFCV in names else TIMM
    return [
        _row(name, number, timings[name, number], timings[peer, number])
        | {"checksums_percent": prices.get(name) if number == 1 else None}
        for name, number in timings
    ]


def checksums_percent(folder: Path, rounds: int) -> float:
    """By how many percent a decoder takes longer than one without checksums, on one thread."""
    return round(percent_longer(decoder(folder, 1), decoder(folder, 1, checked=False), rounds), 2)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4 ... below `most`, and `most`."""
    return [2**power for power in range(most.bit_length()) if 2**power < most] + [most]


def is_installed(name: str) -> bool:
    """Whether what a method needs is installed and works; else a line on stderr says that it is left out."""
    package = METHODS[name].package
    try:
        if package:
            import_module(package)
    except (ImportError, OSError, RuntimeError) as error:  # the last two where libraries of the system are missing
        reason = str(error).partition(",")[0].partition("\n")[0]
        print(f"{name}: left out ({reason}); {install_extra('bench')}", file=sys.stderr)
        return False
    return True


def _time_all(
    names: Sequence[str], folder: Path, threads: Sequence[int], rounds: int
) -> dict[tuple[str, int], list[Timing]]:
    """Time every method with every number of threads once a round, in another order each round."""
    timings: dict[tuple[str, int], list[Timing]] = {(name, number): [] for name in names for number in threads}
    order, generator = list(timings), random.Random(0)
    with ProgressLine("timed", rounds * len(order), "processes") as progress:
        for _ in range(rounds):
            generator.shuffle(order)
            for name, number in order:
                timings[name, number].append(time_in_process(name, folder, number))
                progress.add()
    return timings


def time_in_process(name: str, folder: Path, threads: int) -> Timing:
    """Return the timing that `widemix.bench.loading` prints of a method; raises `RunError` if it fails."""
    command = [sys.executable, "-m", "widemix.bench.loading", name, str(folder), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"{name}, {threads} threads: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def _row(name: str, threads: int, own: Sequence[Timing], peer: Sequence[Timing]) -> dict[str, Any]:
    """Medians over the rounds; the ratios to the peer are computed within each round. `samples` are the timings."""
    row: dict[str, Any] = {"name": name, "threads": threads}
    for key, per in (("images_per_s", "seconds"), ("images_per_cpu_s", "cpu_seconds")):
        speeds, peers = ([timing["images"] / timing[per] for timing in timings] for timings in (own, peer))
        row[key] = round(statistics.median(speeds), 1)
        ratio = statistics.median(a / b for a, b in zip(speeds, peers, strict=True))
        row["ratio" if per == "seconds" else "cpu_ratio"] = round(ratio, 3)
    return row | {"samples": list(own)}
