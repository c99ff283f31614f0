"""Every option of every command reaches the function that does its work, with a value that is not its default."""

import json
import os
import pkgutil
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from inspect import unwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.clone import ROOT
from tests.transcripts import check_transcript, transcript
from widemix.analysis.similarity import Samples
from widemix.bench.gpu import Where
from widemix.cli.commands import run_command
from widemix.cli.options import choose_networks
from widemix.cli.parser import make_parser
from widemix.cli.reference import commands_page
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError
from widemix.estimate.hardware import Cluster
from widemix.evaluation.networks import Network
from widemix.recipe import Recipe
from widemix.studies.protocol import Range, Search
from widemix.studies.rows import Table
from widemix.studies.study_run import StudyRun

# Options that `options.write_outputs` and `bench.report.report` handle for all commands: test_outputs.py.
OUTPUTS = {"--to", "--tensorboard", "--json"}


class Reached(BaseException):
    """The call that a command was to end in, its arguments by name."""


def arguments_of(call: Callable[[], Any], target: str) -> dict[str, Any]:
    """The arguments of the first call of a public function, which goes no further, as at a debugger's breakpoint."""
    found = pkgutil.resolve_name(f"widemix.{target}")
    code = unwrap(found.__init__ if isinstance(found, type) else found).__code__

    def stop(frame, event, _):
        if event == "call" and frame.f_code is code:
            raise Reached({name: frame.f_locals[name] for name in frame.f_locals if name != "self"})

    before = sys.getprofile()
    sys.setprofile(stop)
    try:
        assert call() == 0, "the command ended without it"
    except Reached as reached:
        return reached.args[0]
    finally:
        sys.setprofile(before)
    raise AssertionError(f"{target} was not called")


STEP_3 = "runs/a/checkpoints/00000003"
TRAIN = "train digits/mixer --model.depth 3 --data.path data"
TRAINED = ["--model.depth=3", "--data.path=data"]
COMMANDS = Path(__file__).with_name("calls.txt")
OWN = (PrepSettings, Cluster, Samples, Search, Range, Where)  # whose values are shown
BENCHMARK = {"rounds", "origin", "samples", "threads", "timm_train", "recipe", "overrides", "batch", "compiled"}
BENCHMARK |= {"step_ms", "launch_ms", "lines", "to"}


def shown(value: Any) -> str:
    """A value as text: a recipe by its depth, a network by its name, images and runs by their number."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], StudyRun | np.ndarray):
        return f"{len(value)} of them"
    if isinstance(value, Namespace):  # of a benchmark
        return shown({name: each for name, each in vars(value).items() if name in BENCHMARK})
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, dict):
        return ", ".join(f"{name}={shown(value[name])}" for name in sorted(value))
    if isinstance(value, Recipe | Network | Table):
        return {Recipe: lambda: f"a recipe of depth {value.model.depth}", Network: lambda: value.name}.get(
            type(value), lambda: str(value.path)
        )()
    if isinstance(value, OWN):
        named = value.model_dump() if hasattr(value, "model_dump") else vars(value)
        return f"{type(value).__name__}({shown(dict(named))})"
    if isinstance(value, Path):
        return str(value)
    return repr(value) if isinstance(value, str | int | float | range | None) else "..."


@pytest.fixture(autouse=True)
def folder(digits, tmp_path, monkeypatch, system) -> Path:
    """The current folder, with what the rows name, on a machine without GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,2")
    for name in ("RANK", "WORLD_SIZE", "WIDEMIX_COMMAND"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    system({"torch.cuda.device_count": lambda: 0})
    for name in ("album", "docs", "home", "run", STEP_3, "runs/a/checkpoints/00000004", "recipes/studies/results"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("d", "data", "datasets/digits"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).symlink_to(digits)
    for name in ("net", "a", "b", "c"):
        Path(f"{name}.yaml").write_text("extends: digits/mixer")
    Path("study.yaml").write_text(
        "title: t\nsource: s\nruns:\n- {label: a, recipes: {D: digits/mixer}, axes: {model.depth: [1, 2]}}\n"
        "figure: {x: model.depth}\n"
    )
    Path("names").write_text("one\ntwo\n")
    state = {"step": 1, "data_step": 1, "seconds": 1, "scalars": {}, "metrics": {}, "recipe": {}}
    for checkpoint in ("run", STEP_3, "runs/a/checkpoints/00000004"):
        Path(checkpoint, "COMPLETE").touch()
        Path(checkpoint, "state.json").write_text(json.dumps(state))
    Path("image.png").touch()
    for number in range(3):
        Image.new("RGB", (9, 9)).save(f"album/{number}.png")
    return tmp_path


def call(words: str, target: str, system) -> dict[str, Any]:
    """The arguments of a public function, as a command line calls it."""
    system({"sys.argv": ["/bin/widemix", *shlex.split(words)]})
    if words.startswith("bench "):
        system({"importlib.metadata.version": lambda name: "99"})  # as if all packages were installed
    parser = make_parser(re.sub(r"--\S+ ", "", words).split()[0])
    return arguments_of(lambda: run_command(parser), target)


@transcript(COMMANDS)
def test_what_is_typed_is_what_is_done(case, system, request, tmp_path):
    """`$ COMMAND -> FUNCTION`, and the arguments that it calls the public function with."""

    def answer(line: str) -> str:
        words, _, target = line.rpartition(" -> ")
        text = shown(call(words, target, system))
        for place, name in ((str(tmp_path / "home"), "~"), (sys.prefix, "PREFIX"), (str(ROOT), "ROOT")):
            text = text.replace(place, name)
        return text or "without arguments"

    check_transcript(case, answer, request.config)


def test_no_option_is_left_out():
    """submit's are held by what its dry run prints: tests/launch/test_submit.py."""
    typed, missing = re.findall(r"^\$ (.*) -> ", COMMANDS.read_text(), re.MULTILINE), []
    for part in commands_page().split("\n## ")[1:]:
        name, _, rest = part.partition("\n")
        own = " ".join(words for words in typed if f"widemix {words} ".startswith(f"{name} "))
        for row in re.findall(r"^\| (`-.+?) \|", rest, re.MULTILINE):
            options = set(re.findall(r"`(--?[\w-]+)", row))
            if not options & {*re.findall(r"--?[\w-]+", own), *OUTPUTS} and name != "widemix submit":
                missing.append(f"{name} {row}")
    assert missing == []


RANK = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
RANK |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ("eval net.yaml --ranks 3", "evaluation.assessment.assess"),
        ("bench scale digits/mixer --ranks 3", "bench.scale.read_rows"),
    ],
)
def test_a_rank_starts_no_other_ranks(words, target, monkeypatch, system):
    """Which would start some more: every rank has the words of the command that started it."""
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    assert call(words, target, system)


@pytest.mark.parametrize(("gpus", "options", "ranks"), [(0, "", 1), (1, "", 1), (4, "", 4), (4, " --ranks 1", 1)])
def test_there_are_as_many_ranks_as_gpus(gpus, options, ranks, system, monkeypatch, capsys):
    """At least one; and a job with more tasks than it trains in is told so."""
    monkeypatch.setenv("SLURM_NTASKS", "5")
    system({"torch.cuda.device_count": lambda: gpus})
    target = "trainer.train" if ranks == 1 else "launch.local.launch"
    found = call(f"{TRAIN} --run-dir 'my run'{options}", target, system)
    if ranks > 1:
        command = ["-m", "widemix", "train", "digits/mixer", "--resume=auto", "--run-dir=my run", *TRAINED]
        assert found == {"command": command, "ranks": ranks}
        assert os.environ["WIDEMIX_COMMAND"] == f"widemix {TRAIN} --run-dir 'my run'"
    assert f"the job has 5 tasks, and this command trains in {ranks};" in capsys.readouterr().err


def test_old_copies_are_removed_first(capsys):
    prepare("digits", None, Path("few"), PrepSettings(per_class=2), processes=1)
    for clean, removed in ((), 0), (("--clean", "0"), 1):  # a node's first copy makes the folder
        assert run_command(make_parser("stage"), argv=["stage", "few", "--to", "copies/new", *clean]) == 0
        said = capsys.readouterr()
        [copy] = said.out.splitlines()
        assert Path(copy, "manifest.json").is_file()
        assert said.err.count(f"{copy}: removed") == removed


@pytest.mark.parametrize("name", ["timm:x", "hf:a/b", "no.yaml", "no.yml", "digits/mixer", "run", "/tmp"])
def test_a_network_is_looked_for_only_as_a_path(name):
    assert choose_networks(Namespace(), name) == [name]
    for wrong in ("no", "no.json", "digits/no"):
        with pytest.raises(InputError, match=f"^{wrong}: no such run or checkpoint folder"):
            choose_networks(Namespace(), name, wrong, name)


def test_a_benchmark_names_what_it_needs_and_is_not_there(system, capsys):
    def version(name: str) -> str:
        if name in ("torch", "numpy"):
            return "99"
        raise PackageNotFoundError(name)

    system({"importlib.metadata.version": version})
    assert run_command(make_parser("bench"), argv=["bench", "mixup"]) == 2
    assert "error: bench mixup: needs timm; " in capsys.readouterr().err
