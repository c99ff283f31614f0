"""A loader that was used before a fork gives its batches after it: no thread, lock or queue of the parent is used.

In a process of its own: Python warns of forks in one that has threads, and each fork of a test has many.
"""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import widemix
from tests.clone import CLONE
from widemix.data.compiled import global_compiler_lock

SECONDS = 300  # after which a child that hangs is ended


def make(folder: str, threads: int) -> widemix.Loader:
    keys: dict[str, Any] = {"auto_augment": "rand-m9-n2", "mixup": 0.5, "mix_group": 4}
    return widemix.Loader(folder, "train", 8, 24, seed=1, num_workers=threads, device="cpu", **keys)


def take(loader: widemix.Loader) -> list[bytes]:
    """Some batches of an epoch."""
    loader.set_epoch(3)
    return [images.numpy().tobytes() + targets.numpy().tobytes() for images, targets in itertools.islice(loader, 3)]


def by_os(work: Callable[[], bool]) -> int:
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        os._exit(0 if work() else 1)
    return os.waitpid(child, 0)[1]


def by_multiprocessing(work: Callable[[], bool]) -> int | None:
    def body() -> None:
        signal.alarm(SECONDS)
        sys.exit(0 if work() else 1)

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join()
    return process.exitcode


def refuses(iterator: Iterator) -> bool:
    """Whether an iteration that the parent began says that it cannot go on, and can be closed."""
    try:
        next(iterator)
    except widemix.InputError as error:
        return "begun before a fork" in str(error)
    finally:
        iterator.close()  # type: ignore[attr-defined]
    return False


@pytest.mark.long
def test_loaders_in_forked_processes(images: Path) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", __name__, str(images)]
    done = subprocess.run(command, cwd=CLONE, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("done\n", "")


def main(folder: str) -> None:
    """Print a line for each loader that is wrong."""
    for threads in (1, 2, 4):
        loader = make(folder, threads)
        expected = take(loader)
        begun = iter(loader)
        next(begun)
        works: dict[str, Callable[[], bool]] = {
            "the same loader": lambda one=loader, it=expected: take(one) == it,  # type: ignore[misc]
            "another loader": lambda n=threads, it=expected: take(make(folder, n)) == it,  # type: ignore[misc]
            "a child of the child": lambda one=loader, it=expected: by_os(lambda: take(one) == it) == 0,  # type: ignore[misc]
            "the iteration": lambda it=begun: refuses(it),  # type: ignore[misc]
            "numba's lock": lambda: not global_compiler_lock.is_locked(),
        }
        for name, work in works.items():
            for fork in (by_os, by_multiprocessing):
                if code := fork(work):
                    print(f"{name} {fork.__name__} with {threads} threads: {code}")
        if len(list(begun)) != len(loader) - 1:
            print("the parent's iteration ended early")
    print("done")


if __name__ == "__main__":
    main(sys.argv[1])
