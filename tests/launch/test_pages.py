"""The commands on the pages of launch/README.md are valid."""

import re
import shlex

import pytest
from torch.distributed.run import parse_args

from tests.clone import CLONE, ROOT
from tests.pages import check
from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser

PAGE = "".join((ROOT / name).read_text() for name in ("launch/README.md", "docs/reference/launch.md"))
CODE = re.findall(r"^    (.+)$", PAGE.replace("\\\n", ""), re.MULTILINE)
PROGRAM = re.compile(r"\bwidemix (\w.*)")
OURS = [match[1] for line in CODE if (match := PROGRAM.search(line))]


@pytest.mark.parametrize("words", OURS, ids=[words[:60] for words in OURS])
def test_a_command_is_valid(words, monkeypatch, capsys):
    monkeypatch.chdir(CLONE)
    given = shlex.split(words.replace("RECIPE.yaml", "recipes/digits/rp_mixer.yaml"), comments=True)
    assert run_command(make_parser(), check, given) == 0, capsys.readouterr().err


def test_torchrun_accepts_its_options():
    lines = [line.partition("torchrun ")[2] for line in CODE if "torchrun --" in line]
    assert len(lines) >= 3
    for line in lines:
        words = shlex.split(line, comments=True)
        assert parse_args(words).training_script == "widemix", line
