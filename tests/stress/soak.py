"""A long run of training data: ranks killed at random, changing world sizes, every image checked by its hash.

    python -m tests.stress.soak --minutes 60

Groups of 1, 2 or 4 rank processes read on from the last step that all ranks of the group before had consumed, until
they are killed at any point. Another process, which is never killed, reads each epoch alone, and drops some iterators
on the way: the ranks must have seen the same images, and its memory must not grow.
"""

import argparse
import fcntl
import hashlib
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from PIL import Image

from tests.sections import train_section
from widemix.data.loader import TrainLoader
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.distributed.topology import Topology
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection

BATCH, IMAGES, WORLDS = 16, 200, (1, 2, 4)
AUGMENT = AugmentSection(auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.5, mixup=0.8, cutmix=1.0, mix_group=4)
GROWTH = 20 << 20  # bytes that the process may gain after its first epoch

Row = tuple[int, str]  # a sample's number, and the hash of its image and target


class Counts(NamedTuple):
    """Counts of a soak test."""

    kills: int
    steps: int  # of groups
    epochs: int
    growth: int  # bytes, of the process that is never killed


def write_images(folder: Path) -> None:
    """Small JPEGs of many sizes."""
    numbers = np.random.RandomState(0)
    for number in range(IMAGES + 1):
        path = folder / ("train" if number else "val") / f"class{number % 2}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(numbers.randint(0, 256, (6, 6, 3)).astype(np.uint8))
        small.resize(tuple(numbers.randint(30, 120, 2)), Image.Resampling.BICUBIC).save(path, quality=92)


def loader_of(folder: str, order: str, rank: int, world: int, workers: int, ahead: int) -> TrainLoader:
    section = DataSection(
        path=folder,
        num_classes=2,
        image_size=32,
        workers=workers,
        prefetch_batches=ahead,
        order=order,
        shuffle_window_mib=1,
    )
    return TrainLoader(
        section, AUGMENT, train_section(BATCH, seed=7), Topology(rank, world, rank, world, torch.device("cpu"))
    )


def rows(batch: Any) -> list[Row]:
    found = zip(batch.samples.tolist(), batch.inputs.numpy(), batch.targets.numpy(), strict=True)
    return [(sample, hashlib.blake2b(x.tobytes() + y.tobytes(), digest_size=8).hexdigest()) for sample, x, y in found]


def be_rank(pipe: Connection, epoch: int, step: int, *of: Any) -> None:
    """Send every step that was consumed, until killed."""
    loader = loader_of(*of)
    while True:
        with loader.batches(epoch, step) as batches:
            for number, batch in enumerate(batches, start=step):
                pipe.send((epoch, number, rows(batch)))
        epoch, step = epoch + 1, 0


class Undisturbed:
    """The same epochs read by one rank alone, one thread, and with iterators that are dropped on the way."""

    def __init__(self, folder: str, order: str, chance: random.Random):
        self.loader, self.chance = loader_of(folder, order, 0, 1, 1, 1), chance
        self.known: dict[int, list[list[Row]]] = {}

    def step(self, epoch: int, step: int) -> list[Row]:
        if epoch not in self.known:
            for _ in range(3):
                dropped = self.loader.batches(epoch, self.chance.randrange(self.loader.steps))
                next(dropped)
                dropped.__exit__()
            with self.loader.batches(epoch) as batches:
                self.known = {
                    **{e: self.known[e] for e in self.known if e >= epoch - 1},
                    epoch: [*map(rows, batches)],
                }
        return self.known[epoch][step]


def received(pipe: Connection) -> Iterator[tuple[int, int, list[Row]]]:
    """The remaining messages of a killed rank; the last one may be incomplete."""
    while True:
        try:
            yield pipe.recv()
        except (EOFError, OSError):
            return


def run_group(
    folder: str, order: str, position: tuple[int, int], chance: random.Random
) -> tuple[int, list[list[tuple[int, int, list[Row]]]]]:
    """Start a group at (epoch, step) and kill it after some steps; returns its world and what each rank consumed."""
    context = multiprocessing.get_context("fork")  # from one thread, with all that is compiled
    world = chance.choice(WORLDS)
    workers, ahead = chance.choice((1, 2)), chance.choice((1, 2, 3))
    pipes, ranks = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        fcntl.fcntl(ours.fileno(), fcntl.F_SETPIPE_SZ, 4096)  # so that no rank runs far ahead of the one watched
        process = context.Process(
            target=be_rank, args=(theirs, *position, folder, order, rank, world, workers, ahead), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        ranks.append(process)
    watched = chance.randrange(world)
    consumed: list[list[tuple[int, int, list[Row]]]] = [[] for _ in ranks]
    for _ in range(chance.randint(1, 30)):
        consumed[watched].append(pipes[watched].recv())
    for process in chance.sample(ranks, world):
        process.kill()
        process.join()
    for pipe, lines in zip(pipes, consumed, strict=True):
        lines += received(pipe)
        pipe.close()
    return world, consumed


def soak(folder: str, order: str, seed: int, minutes: float, groups: int) -> Counts:
    """Run `groups` groups, two epochs and `minutes` at least. `AssertionError` for any image out of order."""
    chance = random.Random(seed)
    clean = Undisturbed(folder, order, chance)
    process, until = psutil.Process(), time.monotonic() + 60 * minutes
    position, steps, kills, settled = (0, 0), 0, 0, 0
    clean.step(0, 0)
    while kills < groups or position[0] < 2 or time.monotonic() < until:
        assert threading.active_count() == 1
        world, consumed = run_group(folder, order, position, chance)
        part = BATCH // world
        for rank, lines in enumerate(consumed):
            for epoch, step, found in lines:
                expected = clean.step(epoch, step)[rank * part : (rank + 1) * part]
                assert found == expected, f"{order}, epoch {epoch}, step {step}, rank {rank} of {world}"
        common = min(map(len, consumed))
        epoch, step = divmod(position[0] * clean.loader.steps + position[1] + common, clean.loader.steps)
        assert [line[:2] for line in consumed[0][:common]] == [
            divmod(at, clean.loader.steps)
            for at in range(position[0] * clean.loader.steps + position[1], epoch * clean.loader.steps + step)
        ]
        position, steps, kills = (epoch, step), steps + common, kills + 1
        if not settled and epoch > 1:
            settled = process.memory_info().rss
    growth = process.memory_info().rss - settled
    assert growth < GROWTH, f"{growth >> 20} MiB more than after the first epochs"
    return Counts(kills, steps, position[0], growth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="in all (default: 60)")
    parser.add_argument("--groups", type=int, default=1, help="of ranks for each order, at least (default: 1)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of kills and worlds (default: the time)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"seed {arguments.seed}, {os.cpu_count()} CPUs")
    with tempfile.TemporaryDirectory() as name:
        write_images(Path(name) / "jpegs")
        prepare("image-folder", Path(name) / "jpegs", Path(name) / "data", PrepSettings(shuffle=True))
        for order in ("random", "paged"):
            found = soak(str(Path(name) / "data"), order, arguments.seed, arguments.minutes / 2, arguments.groups)
            print(f"{order}: {found}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
