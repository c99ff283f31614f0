"""Files that are damaged while a process reads them: it ends within 5 seconds, with a line that names the sample."""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import numpy as np
import pytest
from PIL import Image

from tests.data import bad_samples
from tests.forks import Forks
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.formats.beton import open_beton

SECONDS = 5  # by the reader's clock
CUT = "the file ends before it; it was cut short"


def jpegs(folder: Path, seed: int) -> Path:
    numbers = np.random.RandomState(seed)
    for i in range(40):
        path = folder / "source" / ("train" if i < 32 else "val") / f"class{i % 2}" / f"{i:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = numbers.randint(0, 256, (5, 5, 3)).astype(np.uint8)
        Image.fromarray(small).resize(tuple(numbers.randint(60, 90, 2)), Image.Resampling.BICUBIC).save(path)
    prepare("image-folder", folder / "source", folder / "prepared", PrepSettings(), processes=1)
    return folder / "prepared"


def pairs(folder: Path) -> Path:
    folder.mkdir()
    for split, count in (("train", 32), ("dev_matched", 8)):
        rows = [f"{'neutral' if i % 2 else 'entailment'}\tsome people eat\tpeople eat {i}" for i in range(count)]
        (folder / f"{split}.tsv").write_text("\n".join(["gold_label\tsentence1\tsentence2", *rows]) + "\n")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "some", "people", "eat"]) + "\n")
    prepare("mnli", folder, folder.with_name("prepared"), PrepSettings(length=16))
    return folder.with_name("prepared")


def cut(folder: Path) -> None:
    with (folder / "train.beton").open("r+b") as file:
        file.truncate(0)


def flip(folder: Path) -> None:
    """The first byte of sample 5's JPEG."""
    place = int(open_beton(folder / "train.beton").offset[5])
    with (folder / "train.beton").open("r+b") as file:
        file.seek(place)
        file.write(b"\x00")


def overwrite(folder: Path) -> None:
    """In place, with the file of another dataset."""
    other = (folder.parent / "another" / "train.beton").read_bytes()
    size = (folder / "train.beton").stat().st_size
    with (folder / "train.beton").open("r+b") as file:
        file.write(other[:size].ljust(size, b"\x00"))


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, rf"train\.beton: sample \d+ \(train/.*\) cannot be read: {CUT}; `widemix verify .*cut`"),
    "flipped": (
        flip,
        r"train\.beton: sample 5 \(train/.*\) cannot be read: its bytes differ from its checksum; `widemix",
    ),
    "overwritten": (overwrite, r"train\.beton: sample \d+ \(train/.*\) cannot be read: .*; `widemix verify"),
    "text": (cut, rf"train\.beton: sample \d+ \(train\.tsv:\d+\) cannot be read: {CUT}; `widemix verify"),
    "exception": (lambda folder: (folder / "now").touch(), r"sample \d+ \(train/.*\) cannot be read: out of luck; "),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    images = jpegs(tmp_path_factory.mktemp("images"), seed=0)
    for name in ("cut", "flipped", "overwritten", "swapped", "exception"):
        shutil.copytree(images, root / name)
    shutil.copytree(jpegs(tmp_path_factory.mktemp("others"), seed=1), root / "another")
    shutil.copytree(pairs(tmp_path_factory.mktemp("words") / "pairs"), root / "text")
    shutil.copy(root / "another" / "train.beton", root / "swapped")
    return root


@pytest.fixture(scope="module")
def reader(folders) -> Iterator[Forks]:
    """One process for all: none of these faults may end it."""
    names = [folders / name for name in (*FAULTS, "swapped")]
    (folders / "said").touch()
    forks = Forks(bad_samples.main, folders / "clock", folders / "said", names, log=folders / "log")
    yield forks
    forks.kill()
    forks.wait()


def line_of(said: TextIO, reader: Forks) -> str:
    """The next line, when it is whole."""
    line, deadline = "", time.monotonic() + 600
    while not line.endswith("\n"):
        reader.reap()
        more = said.readline()
        assert more or (reader.running and time.monotonic() < deadline), reader.said()
        line += more
        time.sleep(0 if more else 0.01)
    return line


def test_each_fault_ends_the_loop_in_time_and_names_the_sample(folders, reader):
    with (folders / "said").open() as said:
        for name, (fault, words) in FAULTS.items():
            assert line_of(said, reader) == "reading\n", name
            fault(folders / name)
            done = float((folders / "clock").read_text())
            ended, seconds, message = line_of(said, reader).rstrip("\n").split(" ", 2)
            assert ended == "ended"
            assert float(seconds) - done < SECONDS, name
            assert re.search(words, message), message
        opened = line_of(said, reader)
        assert re.search(r"swapped/train\.beton: has \d+ bytes, the manifest says \d+", opened)
        codes, output = reader.wait(600)
        assert codes == [0], output
        assert said.read() == ""


def test_a_training_run_ends_with_one_line(digits, train, tmp_path):
    """The real command, its file cut short while it trains."""
    shutil.copytree(digits, tmp_path / "data")
    command = train("run", "--data.path", str(tmp_path / "data"), "--train.epochs", "1000")
    command.wait_for_step(tmp_path / "run", 2)
    cut(tmp_path / "data")
    code, output = command.wait(timeout=600)
    assert code == 2, output
    assert re.search(rf"train\.beton: sample \d+ \(.*\) cannot be read: {CUT}", output.splitlines()[-1])
    assert "Traceback" not in output
