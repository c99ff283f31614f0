"""Wrong input: an error of one line, exit code 2, nothing created and nothing lost."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.conftest import Command
from tests.forked_popen import ForkedPopen
from tests.forks import Forks


def refused(command: Command, words: str) -> None:
    code, output = command.wait()
    lines = [line for line in output.splitlines() if line and not line.startswith("[Gloo]")]  # torch 2.8's own
    assert code == 2, output
    assert len(lines) == 1, output
    assert lines[0].startswith("error: ")
    assert words in lines[0]


def test_a_truncated_beton_is_reported_once_by_two_ranks(train, digits, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(digits, cut)
    with (cut / "train.beton").open("r+b") as file:
        file.truncate(8_600_000)
    refused(
        train("run", "--data.path", str(cut), "--ranks", "2"), "train.beton: has 8600000 bytes, the manifest says"
    )
    assert not (tmp_path / "run").exists()


def into_nothing(*words: str) -> None:
    """In a fork: write how the command ends when nobody reads its output, and when the disk is full."""
    start = [sys.executable, "-m", "widemix", *words]
    reader, writer = os.pipe()
    os.close(reader)
    closed = ForkedPopen(start, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    with open("/dev/full", "w") as full:
        refused = ForkedPopen(start, stdout=full, stderr=subprocess.PIPE, text=True)
    print(json.dumps([(process.communicate()[1], process.returncode) for process in (closed, refused)]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("words", [["study", "plan", "figure7"], ["cost", "digits/mixer", "--samples", "1000"]])
def test_a_closed_pipe_and_a_full_disk_as_the_output(words, tmp_path):
    """The first ends a command without a word, as `head` expects it; the second with a line."""
    codes, said = Forks(into_nothing, *words, log=tmp_path / "log").wait()
    assert codes == [0], said
    closed, refused = json.loads(said)
    assert closed[0] == ""
    assert closed[1] in (128 + signal.SIGPIPE, 1)  # 1: of rich, which prints the table of cost
    assert refused == ["error: the output could not be written: No space left on device; free some space\n", 1]
