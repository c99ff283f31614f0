"""A process that reads batches of one folder after the other, each until it fails, and writes how it failed.

It writes `reading` once three batches of a folder were consumed, then `ended SECONDS MESSAGE` by a clock that it
keeps in a file: it stands still while the machine has no time for this process.
"""

import itertools
import threading
import time
from pathlib import Path
from typing import TextIO

from tests.data.loading import section, text_section, train_loader
from tests.sections import train_section
from widemix.errors import InputError

TICK = 0.05  # seconds


def keep_time(path: Path) -> None:
    """Write the seconds of ticks, of which a process that waits for a CPU misses some."""
    for ticks in itertools.count(1):
        time.sleep(TICK)
        new = path.with_name("new-clock")
        new.write_text(f"{ticks * TICK}")
        new.replace(path)


def main(clock: Path, said: Path, folders: list[Path]) -> None:
    clock.write_text("0.0")
    threading.Thread(target=keep_time, args=[clock], daemon=True).start()
    with said.open("w", buffering=1) as lines:
        for folder in folders:
            try:
                read(folder, lines)
            except InputError as error:
                print("ended", clock.read_text(), error, file=lines)


def read(folder: Path, lines: TextIO) -> None:
    data = text_section(folder) if folder.name == "text" else section(folder, num_classes=3, workers=2)
    loader = train_loader(data, train=train_section(8))
    for epoch in itertools.count():
        with loader.batches(epoch) as batches:
            for step, _ in enumerate(batches):
                if (epoch, step) == (0, 2):
                    print("reading", file=lines)
