"""How a run begins and ends: what is said, written and removed, and by which rank."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Fork
from tests.transcripts import check_transcript, transcript
from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser

SMALL = "--train.epochs 99 --train.save_every_steps 2 --eval.every_epochs 50 --model.depth 1 --log.tensorboard false"
SMALL += " --log.images 0 --log.mistakes 0 --schedule.warmup_epochs 0 --data.workers 1"


@pytest.fixture
def answer(digits, tmp_path, capsys, monkeypatch):
    """`train RUN WORDS` in this process, `ranks RUN WORDS` on two ranks; other commands are sh's."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(command: str) -> str:
        name, *words = shlex.split(command)
        if name not in ("train", "ranks"):
            return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False).stdout
        given = ["digits/mixer", "--data.path", str(digits), *SMALL.split(), "--run-dir", *words]
        if name == "ranks":
            given[given.index("--run-dir") + 1] = f"{tmp_path}/{words[0]}"
            code, said = Fork(*given, log=tmp_path / "log", world=2).wait()
        else:
            code = run_command(make_parser(), None, ["train", *given])
            said = "".join(capsys.readouterr())
        said = re.sub(r"top-1 \S+ % after \S+ s", "top-1 N % after N s", said.replace(f"{tmp_path}/", ""))
        lines = [line for line in said.splitlines() if not re.match(r"epoch |step \d|compiling the functions", line)]
        return "\n".join([*lines, *[f"exit code {int(code)}"] * (code != 0)])

    return run


@transcript(Path(__file__).with_name("trainer.txt"))
def test_how_runs_begin_and_end(case, answer, request):
    check_transcript(case, answer, request.config)
