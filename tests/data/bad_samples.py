"""A process that reads batches of one folder after the other, each until it fails, and writes how it failed.

It writes `reading` once three batches of a folder were consumed, then `ended SECONDS MESSAGE` by a clock that it
keeps in a file: it stands still while the machine has no time for this process. In the folder `exception` Pillow
decodes, and fails once there is a file named `now`.
"""

import functools
import itertools
import threading
import time
from pathlib import Path
from typing import TextIO

import torch

import widemix.data.decode
import widemix.data.with_pillow
from tests.sections import train_section
from widemix.data.loader import TrainLoader
from widemix.data.tokens import Tokens
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection, TextDataSection

TICK = 0.05  # seconds


class Clock:
    """Seconds of ticks, of which a process that waits for a CPU misses some."""

    def __init__(self, path: Path):
        self.path, self._ticks = path, 0
        path.write_text("0.0")
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        while True:
            time.sleep(TICK)
            self._ticks += 1
            new = self.path.with_name("new-clock")
            new.write_text(f"{self._ticks * TICK}")
            new.replace(self.path)


def main(clock: Path, said: Path, folders: list[Path]) -> None:
    Clock(clock)
    with said.open("w", buffering=1) as lines:
        read_all(clock, lines, folders)


def read_all(clock: Path, lines: TextIO, folders: list[Path]) -> None:
    for folder in folders:
        if folder.name == "exception":
            widemix.data.decode._compiled_reader = lambda: None
            widemix.data.with_pillow._jpeg = functools.partial(_failing, widemix.data.with_pillow._jpeg, folder)
        try:
            _read(folder, lines)
        except InputError as error:
            print("ended", clock.read_text(), error, file=lines)


def _read(folder: Path, lines: TextIO) -> None:
    kind = TextDataSection if folder.name == "text" else DataSection
    keys = {"kind": "text"} if folder.name == "text" else {"image_size": 24}
    section = kind(path=str(folder), num_classes=3, workers=2, order="random", **keys)
    loader = TrainLoader(section, AugmentSection(), train_section(8), Topology(0, 1, 0, 1, torch.device("cpu")))
    assert isinstance(loader.source, Tokens) == (folder.name == "text")
    for epoch in itertools.count():
        with loader.batches(epoch) as batches:
            for step, _ in enumerate(batches):
                if (epoch, step) == (0, 2):
                    print("reading", file=lines)


def _failing(work, folder: Path, *words):
    if (folder / "now").exists():
        raise RuntimeError("out of luck")
    return work(*words)
