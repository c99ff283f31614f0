"""Files that are damaged while a process reads them: it ends within 5 seconds, with a line that names the sample."""

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from tests.data import bad_samples
from tests.data.loading import damage
from tests.forks import Forks

SECONDS = 5  # by the reader's clock
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
    "damaged": (
        lambda folder: damage(folder, 5),
        r"train\.beton: sample 5 \(train/.*\) cannot be read: its bytes differ from its checksum; `widemix",
    ),
    "overwritten": (overwrite, r"train\.beton: sample \d+ \(train/.*\) cannot be read: .*; `widemix verify"),
    "text": (cut, rf"train\.beton: sample \d+ \(train\.tsv:\d+\) cannot be read: {CUT}; `widemix verify"),
}


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


def test_each_fault_ends_in_time_and_names_the_sample(images, pairs, tmp_path):
    """In one process: none of these faults may end it, and a file that is not the manifest's is not opened."""
    for name in (*FAULTS, "swapped"):
        shutil.copytree(pairs if name == "text" else images, tmp_path / name)
    os.truncate(tmp_path / "swapped/train.beton", 4096)
    (tmp_path / "said").touch()
    folders = [tmp_path / name for name in (*FAULTS, "swapped")]
    reader = Forks(bad_samples.main, tmp_path / "clock", tmp_path / "said", folders, log=tmp_path / "log")
    try:
        with (tmp_path / "said").open() as said:
            for name, (fault, words) in FAULTS.items():
                assert line_of(said, reader) == "reading\n", name
                fault(tmp_path / name)
                done = float((tmp_path / "clock").read_text())
                ended, seconds, message = line_of(said, reader).rstrip("\n").split(" ", 2)
                assert ended == "ended"
                assert float(seconds) - done < SECONDS, name
                assert re.search(words, message), message
            assert re.search(r"swapped/train\.beton: has 4096 bytes, the manifest says \d+", line_of(said, reader))
            codes, output = reader.wait(600)
            assert codes == [0], output
            assert said.read() == ""
    finally:
        reader.kill()
        reader.wait()


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
