"""Files that are damaged while a process reads them: it ends with a line that names the sample."""

import itertools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.loading import read, section, text_section, train_loader
from tests.sections import train_section
from widemix.errors import InputError

CUT = "the file ends before it; it was cut short"


def cut(folder: Path) -> None:
    os.truncate(folder / "train.beton", 0)


def overwrite(folder: Path) -> None:
    """In place, with other numbers."""
    size = (folder / "train.beton").stat().st_size
    with (folder / "train.beton").open("r+b") as file:
        file.write(os.urandom(size))


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, rf"train\.beton: sample \d+ \(train/.*\) cannot be read: {CUT}; `widemix verify .*cut`"),
    "overwritten": (overwrite, r"train\.beton: sample \d+ \(train/.*\) cannot be read: .*; `widemix verify"),
    "text": (cut, rf"train\.beton: sample \d+ \(train\.tsv:\d+\) cannot be read: {CUT}; `widemix verify"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_damaged_while_it_is_read_is_named(name, images, pairs, tmp_path):
    """None of these faults ends the process."""
    fault, words = FAULTS[name]
    folder = Path(shutil.copytree(pairs if name == "text" else images, tmp_path / name))
    data = text_section(folder) if name == "text" else section(folder, workers=2)
    loader = train_loader(data, train=train_section(8))
    with loader.batches(0) as batches:
        for _ in range(3):
            next(batches)
        fault(folder)
        with pytest.raises(InputError, match=words):
            list(itertools.chain(batches, *(read(loader, epoch) for epoch in (1, 2, 3))))


def test_a_training_run_ends_with_one_line(digits, train, tmp_path):
    shutil.copytree(digits, tmp_path / "data")
    command = train("run", "--data.path", str(tmp_path / "data"), "--train.epochs", "1000")
    command.wait_for_step(tmp_path / "run", 2)
    cut(tmp_path / "data")
    code, output = command.wait(timeout=600)
    assert code == 2, output
    assert re.search(rf"train\.beton: sample \d+ \(.*\) cannot be read: {CUT}", output.splitlines()[-1])
    assert "Traceback" not in output
