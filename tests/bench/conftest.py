"""A clock that the tests of the benchmarks move, and small images, which are prepared in this process."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from tests.conftest import System
from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser
from widemix.data.decode import Decoder


class Clock:
    """Wall clock and CPU time, which go on where `takes` says so and nowhere else."""

    def __init__(self, system: System):
        self.seconds = 0.0
        system({f"time.{name}": lambda: self.seconds for name in ("perf_counter", "process_time")})

    def takes(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock(system: System) -> Clock:
    return Clock(system)


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """Twelve JPEGs at two depths, two with the same name, and what is none."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(12):
        file = folder / ("a" if number % 2 else "b/c") / f"{number // 2}.{'jpg' if number % 3 else 'JPEG'}"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(256, size=(40 + number, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file, "JPEG")
    (folder / "notes.txt").write_text("none")
    return folder


class Processes:
    """In place of subprocess.run: `widemix prep` runs in this process, `other` answers all else."""

    def __init__(self):
        self.prepared: dict[Path, tuple[str, ...]] = {}  # the options of each folder
        self.other = None

    def __call__(self, command, **options):
        if command[3:4] != ["prep"]:
            return self.other(command, **options)
        words = command[3:]
        assert words[:3] == ["prep", "image-folder", "--from"]
        assert (command[:3], words[4], words[6]) == ([sys.executable, "-m", "widemix"], "--to", "--no-shuffle")
        self.prepared[Path(words[5])] = tuple(words[7:])
        code = run_command(make_parser(), argv=[*words, "--processes", "1"])
        return SimpleNamespace(returncode=code, stdout="", stderr="")


@pytest.fixture
def processes(system: System) -> Processes:
    processes = Processes()
    system({"subprocess.run": processes})
    return processes


@pytest.fixture
def reads(monkeypatch) -> list[tuple]:
    """What our decoder is asked for: samples, boxes, cubic, images and threads."""
    found, read = [], Decoder.read

    def kept(decoder, samples, boxes, cubic, images, threads):
        found.append((samples, boxes, cubic, images, threads))
        return read(decoder, samples, boxes, cubic, images, threads)

    monkeypatch.setattr(Decoder, "read", kept)
    return found
