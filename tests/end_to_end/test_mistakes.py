"""Wrong input: an error of one line, exit code 2, nothing created and nothing lost."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import timm
from timm.models import _registry

from tests.clone import CLONE
from tests.conftest import Command
from tests.forked_popen import ForkedPopen
from tests.forks import Forks
from widemix.recipe import dump_recipe, load_recipe


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


RECIPE = "train digits/mixer --data.path {digits}"
EARLY = {
    f"{RECIPE} --model.kind timm --model.name resnet81": "timm has no such network; did you mean resnet18?",
    f"{RECIPE} --train.init_from timm:resnet81": "timm has no such network; did you mean timm:resnet18?",
    f"{RECIPE} --train.init_from {{digits}}/none": "/none: no such run or checkpoint folder; a weights file",
    f"{RECIPE} --data.image_size 9": "model.patch_size 2 does not divide data.image_size 9",
    f"{RECIPE} --data.eval_split val": "no split 'val'; it has train, test",
    f"{RECIPE} --data.num_classes 7": "has 10 classes; --data.num_classes 0",
    f"{RECIPE}/none": "/none: no such folder",
    "eval timm:resnet81 --data {digits}": "timm has no such network; did you mean timm:resnet18?",
    "eval timm:resnet18 --data {digits} --split val": "no split 'val'; it has train, test",
    "eval {run} --data {digits}/none": "/none: no such folder",
    "eval {run}": "none: no such folder in ",
}
WITHOUT_TORCH = """
import sys
from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser
codes = [run_command(make_parser(), None, words.split()) for words in sys.argv[1:]]
assert set(codes) == {2} and "torch" not in sys.modules, codes
"""


def test_mistakes_are_told_before_torch_is_imported(digits, tmp_path):
    (tmp_path / "recipe.yaml").write_text(dump_recipe(load_recipe("digits/mixer", [("data.path", "none")])))
    words = [command.format(digits=digits, run=tmp_path) for command in EARLY]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], cwd=CLONE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line, expected in zip(done.stderr.splitlines(), EARLY.values(), strict=True):
        assert line.startswith("error: "), line
        assert expected in line


KNOWN = """
import sys
from widemix.models.timm_networks.names import check_name
for name in sys.argv[1:]:
    check_name(name)
"""


def test_timm_networks_are_known_before_timm_is_imported():
    every = [*timm.list_models(include_tags=True)[::25], *sorted(_registry._deprecated_models)[::10]]
    every += ["mixer", "widemix_mixer", "mixer_b16_224.goog_in21k"]
    done = subprocess.run([sys.executable, "-c", KNOWN, *every], cwd=CLONE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
