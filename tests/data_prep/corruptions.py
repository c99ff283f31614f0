"""Corrupts prepared folders at random, and counts what loading and `verify` make of it.

    python -m tests.data_prep.corruptions --count 1000

For each kind of file (JPEGs with restart markers, JPEGs with their own bytes, coefficients, pixels, text, JPEGs with
targets) and each seed one file of the folder is changed: bits, runs of bytes, zeros, copied or exchanged places, a
lost, inserted or cut end. Then every sample is read as in training and in evaluation. Each corruption is one of:

    refused    the folder is not opened, with one line
    named      the samples that differ are named, with the command that tells the cure; the others are right
    harmless   all samples are right: the bytes were between samples, or nothing reads them
    SILENT     a wrong sample was read without a word
    CRASH      anything but a line of ours

and `verify` finds it or not. The exit code is 1 if anything was silent, crashed, or unknown to `verify`.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.data_prep.interruptions import PREPARED
from widemix.data.batches import StepPart
from widemix.data.images import AugmentedImages
from widemix.data.tokens import Tokens
from widemix.data_prep.prepare import prepare
from widemix.data_prep.verify import verify
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection, TextDataSection

KINDS = [kind for kind in PREPARED if kind != "arrays"]
BAD = ("SILENT", "CRASH", "NOT VERIFIED")
PLACE = Topology(0, 1, 0, 1, torch.device("cpu"))
EPOCHS = 2


def prepare_all(folder: Path) -> dict[str, Path]:
    """A small prepared folder of each kind."""
    for kind in KINDS:
        source, make, settings = PREPARED[kind]
        (folder / "in" / kind).mkdir(parents=True)
        make(folder / "in" / kind)
        prepare(source, folder / "in" / kind, folder / kind, settings, processes=1)
    return {kind: folder / kind for kind in KINDS}


def read_all(kind: str, folder: Path) -> Iterator[tuple[str, bytes | str]]:
    """Each sample in each way of reading: its pixels or tokens and label or targets, or the error.

    Raises as opening does.
    """
    if kind == "text":
        section = TextDataSection(kind="text", path=str(folder), num_classes=3)
        sources = {"text": Tokens(section, "train", PLACE)}
    else:
        targets: Any = "regression" if kind == "targets" else "class"
        data = DataSection(path=str(folder), num_classes=2, image_size=24, workers=1, targets=targets)
        sources = {"images": AugmentedImages(data, AugmentSection(), 0, PLACE)}
    for name, source in sources.items():
        for epoch in range(EPOCHS):
            for sample in range(len(source.file)):
                view = np.array([sample])
                try:
                    host = source.read(StepPart(view, epoch))
                    yield f"{name} {epoch} {sample}", host.inputs.numpy().tobytes() + host.labels.numpy().tobytes()
                except InputError as error:
                    named = f"sample {sample} " in str(error) and "`widemix verify" in str(error)
                    yield f"{name} {epoch} {sample}", "named" if named else f"CRASH: {error}"


def content(name: str, data: bytearray) -> Any:
    """What a file says: of a manifest not its white space."""
    with contextlib.suppress(ValueError):
        return json.loads(data) if name == "manifest.json" else bytes(data)
    return bytes(data)


def corrupt(folder: Path, rng: random.Random) -> str:
    """Change one file; returns what was done."""
    names = sorted(path.name for path in folder.iterdir())
    weights = [12 if name == "train.beton" else 2 if name == "train.crc32c" else 1 for name in names]
    path = folder / rng.choices(names, weights)[0]
    data = bytearray(path.read_bytes())
    start = next((i for i in range(len(data)) if data[i]), 0) if rng.random() < 0.5 else 0
    if path.name == "train.beton" and rng.random() < 0.8:  # most of a small file lies before its first page
        start = 8 << 20
    before = content(path.name, data)
    while content(path.name, data) == before:
        at, other = rng.randrange(start, len(data)), rng.randrange(start, len(data))
        size = min(rng.choice((1, 4, 64, 4096)), len(data) - max(at, other))
        what = rng.choice(("bit", "bytes", "zeros", "copy", "exchange", "cut", "insert", "remove"))
        if what == "bit":
            data[at] ^= 1 << rng.randrange(8)
        elif what == "bytes":
            data[at : at + size] = rng.randbytes(size)
        elif what == "zeros":
            data[at : at + size] = bytes(size)
        elif what == "copy":
            data[at : at + size] = data[other : other + size]
        elif what == "exchange" and abs(at - other) >= size:
            data[at : at + size], data[other : other + size] = data[other : other + size], data[at : at + size]
        elif what == "cut":
            del data[at:]
        elif what == "insert":
            data[at:at] = rng.randbytes(size)
        elif what == "remove":
            del data[at : at + size]
    path.write_bytes(data)
    return f"{what} of {size} at {at} of {path.name}"


def outcome(kind: str, folder: Path, right: dict[str, bytes | str]) -> str:
    """What loading a corrupted folder makes of it."""
    try:
        read = dict(read_all(kind, folder))
    except InputError as error:
        return "refused" if "\n" not in str(error) and str(folder) in str(error) else f"CRASH: {error}"
    wrong = {name: value for name, value in read.items() if value != right[name]}
    if len(read) != len(right) or any(isinstance(value, bytes) for value in wrong.values()):
        return "SILENT"
    return next((value for value in wrong.values() if value != "named"), "named" if wrong else "harmless")


def run(kind: str, whole: Path, count: int, seed: int, report: Callable[[str], None]) -> None:
    """Corrupt a folder `count` times, and report one outcome a time and whether `verify` found it."""
    right = dict(read_all(kind, whole))
    for number in range(seed, seed + count):
        rng = random.Random(f"{kind} {number}")
        folder = whole.with_name("corrupted")
        shutil.copytree(whole, folder)
        what = corrupt(folder, rng)
        try:
            result = outcome(kind, folder, right)
        except Exception:
            result = f"CRASH: {traceback.format_exc()}"
        try:
            found = bool(verify(folder))
        except InputError:
            found = True
        except Exception:
            found = False
            what += traceback.format_exc()
        report(f"{result if found else f'NOT VERIFIED, {result}'}\t{number}: {what}")
        shutil.rmtree(folder)


def in_child(kind: str, whole: Path, count: int, seed: int) -> list[str]:
    """What `run` reports in a process of its own; if that dies, the last line says so."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receive)
        with os.fdopen(send, "w") as pipe:
            run(kind, whole, count, seed, lambda line: print(repr(line), file=pipe, flush=True))
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as pipe:
        lines = [eval(line) for line in pipe]
    status = os.waitpid(pid, 0)[1]
    return lines + ([f"CRASH: the process ended with {status}\t{seed + len(lines)}"] if status else [])


def main() -> int:
    """Print the outcomes of each kind; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="corruptions of each kind (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first (default: 0)")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    arguments = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        folders = prepare_all(Path(name))
        for kind in arguments.kinds:
            lines = in_child(kind, folders[kind], arguments.count, arguments.seed)
            counts = collections.Counter(line.partition("\t")[0].partition(":")[0] for line in lines)
            print(f"{kind}: {len(lines)} corruptions: " + ", ".join(f"{n} {k}" for k, n in sorted(counts.items())))
            wrong = [line for line in lines if line.startswith(BAD)]
            print("\n".join(wrong[:10]), end="\n" if wrong else "", flush=True)
            bad += len(wrong)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
