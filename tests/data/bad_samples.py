"""A process that reads batches of one folder after the other, each until it fails, and prints how it failed.

    python -m tests.data.bad_samples FOLDER...

Prints `reading` once three batches of a folder were consumed, then `ended SECONDS MESSAGE` by the system's monotonic
clock. In the folder `exception` Pillow decodes, and fails once there is a file named `now`.
"""

import functools
import itertools
import sys
import time
from pathlib import Path

import torch

import pipeline.data.decode
import pipeline.data.with_pillow
from pipeline.data.loader import TrainLoader
from pipeline.data.tokens import Tokens
from pipeline.distributed.topology import Topology
from pipeline.errors import InputError
from pipeline.recipe.augment import AugmentSection
from pipeline.recipe.data import DataSection, TextDataSection
from tests.sections import train_section


def main(folders: list[str]) -> None:
    for folder in map(Path, folders):
        if folder.name == "exception":
            pipeline.data.decode._compiled_reader = lambda: None
            pipeline.data.with_pillow._jpeg = functools.partial(_failing, pipeline.data.with_pillow._jpeg, folder)
        try:
            _read(folder)
        except InputError as error:
            print("ended", time.monotonic(), error, flush=True)


def _read(folder: Path) -> None:
    kind = TextDataSection if folder.name == "text" else DataSection
    keys = {"kind": "text"} if folder.name == "text" else {"image_size": 24}
    section = kind(path=str(folder), num_classes=3, workers=2, order="random", **keys)
    loader = TrainLoader(section, AugmentSection(), train_section(8), Topology(0, 1, 0, 1, torch.device("cpu")))
    assert isinstance(loader.source, Tokens) == (folder.name == "text")
    for epoch in itertools.count():
        with loader.batches(epoch) as batches:
            for step, _ in enumerate(batches):
                if (epoch, step) == (0, 2):
                    print("reading", flush=True)


def _failing(work, folder: Path, *words):
    if (folder / "now").exists():
        raise RuntimeError("out of luck")
    return work(*words)


if __name__ == "__main__":
    main(sys.argv[1:])
