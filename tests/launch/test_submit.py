"""What is submitted to Slurm, and how a job is judged by its ranks' status. A real Slurm is in test_slurm.py."""

import getpass
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.conftest import ROOT
from tests.forks import free_port
from widemix.command_line.arguments import Parser
from widemix.command_line.commands import run_command, split_overrides
from widemix.distributed.rank_status import RankStatus, read_rank_statuses
from widemix.distributed.start_times import VARIABLE
from widemix.errors import Exit, InputError, RunError
from widemix.launch.relay import Relay
from widemix.launch.slurm import commands
from widemix.launch.slurm import finish as finish_module
from widemix.launch.slurm import node as node_module
from widemix.launch.slurm import options as options_module
from widemix.launch.slurm import ports as ports_module
from widemix.launch.slurm import submit as module
from widemix.launch.slurm.finish import _finish, judge, saved_step
from widemix.launch.slurm.node import _can_exclude, _start, torchrun_command, wait_for_all_nodes
from widemix.launch.slurm.ports import _is_free, free_ports
from widemix.launch.slurm.study_runs import cross, kept_path, merge, ranges, unfinished
from widemix.launch.torchrun import SHUTDOWN_TIMEOUT_S, check_torch, train_program
from widemix.recipe import dump_recipe, load_recipe

RECIPE = ROOT / "recipes/digits/mixer.yaml"


def put_on_path(scripts: dict[str, str], folder: Path, monkeypatch) -> None:
    """Let programs of these names be found first, each a script of bash."""
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_an_older_torch_is_refused(monkeypatch):
    for found, refused in (("2.7.1+cu126", True), ("2.8.0+cu128", False), ("2.15.0.dev20261101", False)):
        monkeypatch.setattr("widemix.launch.torchrun.version", lambda _, found=found: found)
        monkeypatch.setattr("widemix.torch_support.version", lambda _, found=found: found)
        with pytest.raises(InputError, match=r"torch 2\.7.*need torch 2\.8") if refused else nullcontext():
            check_torch()


@pytest.fixture
def dry_run(digits, capsys):
    """widemix submit --dry-run: dry_run(folder, options...) -> its output, complaints included."""

    def run(folder, *options: str, code: int = 0) -> str:
        words = ["recipes/digits/mixer.yaml", "--data.path", str(digits), "--run-dir", str(folder), "--dry-run"]
        parser = Parser()
        module.add_arguments(parser)
        assert run_command(parser, module.submit, [*words, *options]) == code
        return "".join(capsys.readouterr())

    return run


def test_the_dry_run_prints_one_command_and_the_script_and_does_nothing(dry_run, tmp_path):
    folder = tmp_path / "a 'run'"
    options = ("--nodes", "2", "--gpus-per-node", "2", "--account", "g1", "--time", "1:00:00", "--exclude", "n[3-4]")
    command, note, script = dry_run(folder, *options, "--data.eval_split", "a; rm x").split("\n", 2)
    words = shlex.split(command)
    assert words[:2] == ["sbatch", "--parsable"]
    for name, value in zip(options[::2], options[1::2], strict=True):
        assert words[words.index(name) + 1] == value
    assert words[-1] == "--data.eval_split=a; rm x"  # one word, whatever a recipe's text holds
    note, path, script = [note, *script.split("\n", 1)]
    kept = words[words.index("--") + 1]
    assert note == f"# {kept} is written when this is submitted: the recipe as it is then"
    assert path == f"# {ROOT / 'launch/slurm/train.sbatch'}"
    assert script == (ROOT / "launch/slurm/train.sbatch").read_text()
    assert not folder.exists()


def test_other_options_of_sbatch_come_after_those_of_submit(dry_run, tmp_path):
    others = ("--nodelist=n1", "-Ahub", "--mem=64G")
    command = dry_run(tmp_path / "run", *(f"--sbatch={other}" for other in others)).partition("\n")[0]
    assert f"--exclusive --mem 0 {' '.join(others)} " in command


def test_an_elastic_job_is_told_the_numbers_of_nodes_by_which_the_batch_divides(dry_run, tmp_path):
    words = shlex.split(
        dry_run(tmp_path / "run", "--nodes", "4", "--gpus-per-node", "1", "--elastic", "1").partition("\n")[0]
    )
    script = words.index(str(module.SCRIPT))
    assert "--no-kill" in words[:script]
    assert words[script + 7] == "4,2,1"
    words = shlex.split(dry_run(tmp_path / "run", "--nodes", "4", "--gpus-per-node", "1").partition("\n")[0])
    assert "--no-kill" not in words
    assert words[words.index(str(module.SCRIPT)) + 7] == ""


def parts(output: str) -> tuple[list[str], list[str]]:
    """The words of a dry run's command up to its script, and those after it."""
    words = shlex.split(output.partition("\n")[0])
    script = next(number for number, word in enumerate(words) if word.endswith(".sbatch"))
    return words[: script + 1], words[script + 1 :]


def test_every_option_is_where_sbatch_and_train_sbatch_look_for_it(dry_run, tmp_path):
    for name in ("own.sbatch", "e.tar"):
        (tmp_path / name).touch()
    passed = {"partition": "p", "account": "a", "qos": "q", "time": "6", "constraint": "c", "exclude": "x"}
    given = {"nodes": 4, "gpus-per-node": 2, "ranks-per-node": 1, "cpus-per-node": 6, "elastic": 2, "restarts": 3}
    given |= {"requeues": 7, "stage-to": "$S/x", "setup": "module load cuda", "script": tmp_path / "own.sbatch"}
    given |= {"environment": tmp_path / "e.tar"} | passed
    sbatch, others = parts(dry_run(tmp_path / "a b", *(f"--{name}={value}" for name, value in given.items())))
    assert sbatch[:2] == ["sbatch", "--parsable"]
    assert sbatch[-1] == str(tmp_path / "own.sbatch")
    own = {"job-name": "widemix-a b", "nodes": "4", "gpus-per-node": "2", "cpus-per-task": "6"} | passed
    own["output"] = f"{tmp_path}/a b/slurm/%j.log"
    assert "--no-kill" in sbatch
    pairs = [word for word in sbatch[2:-1] if word != "--no-kill"]
    assert dict(zip(pairs[::2], pairs[1::2], strict=True)) == {f"--{name}": value for name, value in own.items()}
    places = [str(tmp_path / "a b"), "1", "3", "7", "no", "$S/x", "4,2", str(tmp_path / "e.tar"), "module load cuda"]
    assert others[:11] == [*places, sys.executable, "--"]


def test_the_script_asks_for_a_task_a_node_a_requeue_and_a_signal_in_time():
    """In which the ranks may save, as torchrun waits for them; the log of a start before stays."""
    lines = module.SCRIPT.read_text().splitlines()
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    signal = f"--signal=B:USR1@{60 * finish_module.NOTICE_MIN}"
    assert asked == {"--ntasks-per-node=1", "--requeue", signal, "--open-mode=append"}
    assert 200 < SHUTDOWN_TIMEOUT_S < 60 * finish_module.NOTICE_MIN


def test_without_options_a_job_has_whole_nodes_a_rank_for_each_gpu_and_no_checks(dry_run, tmp_path):
    sbatch, others = parts(dry_run(tmp_path / "run"))
    gpus = ["--gpus-per-node", "4"]
    start = ["sbatch", "--parsable", "--job-name", "widemix-run", "--nodes", "1"]
    output = ["--output", f"{tmp_path}/run/slurm/%j.log"]
    assert sbatch == [*start, *output, *gpus, "--exclusive", "--mem", "0", str(module.SCRIPT)]
    assert others[:9] == [str(tmp_path / "run"), "4", "2", "100", "no", "", "", "", ""]
    sbatch, others = parts(dry_run(tmp_path / "run", "--gpus-per-node", "0", "--preflight", "report"))
    assert "--gpus-per-node" not in sbatch
    assert (others[1], others[4]) == ("1", "report")
    sbatch, others = parts(dry_run(tmp_path / "runs", "--vary", "train.seed=0,1", "--preflight", "exclude"))
    assert sbatch[sbatch.index("--output") + 1] == f"{tmp_path}/runs/slurm/%A_%a.log"
    assert (others[4], others[-2:]) == ("exclude", [sys.executable, "--"])


def test_values_of_paths_and_names_are_not_yaml():
    """Which `O #2,P` is not, nor a folder `a: b`."""
    texts = {"O #2, a: b,1e3,~": ["O #2", "a: b", "1e3", "~"], "'a,b',\"c\\td\"": ["a,b", "c\td"], "a": ["a"]}
    for text, paths in texts.items():
        runs = cross(RECIPE, [f"data.path={text}", "train.seed=0"])
        assert [run.recipe.data.path for run in runs] == paths
    with pytest.raises(InputError, match="cannot be a value"):
        cross(RECIPE, ["data.path=a,,b"])


@pytest.mark.parametrize(
    ("time", "minutes"),
    [
        ("6", 6),
        ("90", 90),
        ("5:01", 5 + 1 / 60),
        ("90:30", 90.5),
        ("1:30:00", 90),
        ("48:00:06", 2880.1),
        ("1-0", 1440),
        ("2-3", 51 * 60),
        ("1-2:03", 26 * 60 + 3),
        ("1-2:03:30", 26 * 60 + 3.5),
        ("30-23:59:59", 30 * 1440 + 23 * 60 + 59 + 59 / 60),
        ("5:60", None),
        ("1:60:00", None),
        ("1:00:60", None),
        ("1-24", None),
        ("0-24", None),
        ("0:60:00", None),
        ("1-2:60", None),
        ("1:2:3:4", None),
        ("1-", None),
        ("-1", None),
        ("1.5", None),
        ("UNLIMITED", None),
    ],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(time, minutes):
    with nullcontext() if minutes else pytest.raises(InputError, match=f"^--time {time}: "):
        assert options_module._minutes(time) == pytest.approx(minutes)


def test_an_elastic_study_trains_on_numbers_of_nodes_by_which_all_its_batches_divide():
    sizes = [[("train.global_batch", size), ("augment.mix_group", "2")] for size in ("48", "64")]
    recipes = [load_recipe(RECIPE, overrides) for overrides in sizes]
    elastic_sizes, arguments = options_module.elastic_sizes, Namespace(nodes=8, elastic=2)
    assert elastic_sizes(arguments, recipes[:1], 1) == "8,6,4,3,2"
    assert elastic_sizes(arguments, recipes, 1) == elastic_sizes(arguments, recipes[::-1], 1) == "8,4,2"
    assert elastic_sizes(arguments, recipes, 2) == "4,2"
    assert elastic_sizes(Namespace(nodes=8, elastic=3), recipes, 1) == "8,4"
    assert elastic_sizes(Namespace(nodes=8, elastic=None), recipes, 1) == ""


@pytest.mark.parametrize(
    ("image", "is_file"),
    [("ubuntu", False), ("a.io#b/c:25.01", False), ("/x/y", True), ("./y", True), ("../y", True), ("y.sqsh", True)],
)
def test_an_image_is_a_file_or_a_name_in_a_registry(image, is_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert options_module.container_image(image) == (Path(os.path.normpath(tmp_path / image)) if is_file else image)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--nodes", "3"), "does not divide by 12 ranks"),
        (("--sbatch=--output=x",), "--sbatch=--output=x: is set by submit itself"),
        (("--sbatch=--nodes=3",), "--sbatch=--nodes=3: is set by submit itself"),
        (("--sbatch=--wrap", "--sbatch=x"), "--sbatch=--wrap: is set by submit itself"),
        (("--environment", "e.tar", "--stage-to", "/x", "--container", "c.sif"), "goes without a container"),
        (("--nodes", "0"), "--nodes 0: must be at least 1"),
        (("--time", "5"), "--time 5: is 5 minutes, and 5 minutes before its end a job is told to save"),
        (("--time", "4:59"), "is 4.98333 minutes"),
        (("--time", "0-0:5"), "is 5 minutes"),
        (("--time", "tomorrow"), "--time tomorrow: should be minutes, minutes:seconds"),
        (("--requeues", "-1"), "--requeues -1: must be at least 0"),
        (("--elastic", "0"), "--elastic 0: must be at least 1"),
        (("--elastic", "2", "--nodes", "2"), "--elastic 2: should be less than --nodes, which is 2"),
        (("--elastic", "1", "--nodes", "2", "--preflight", "report"), "cannot be combined with --preflight"),
        (
            ("--elastic", "3", "--nodes", "4", "--gpus-per-node", "1"),
            "divides by the ranks of no number of nodes from 3 to 3",
        ),
        (("--environment", "e.tar"), "--environment: needs --stage-to"),
        (("--environment", "e.tar", "--stage-to", "/x"), "e.tar: no such file"),
        (("--ranks-per-node", "0"), "--ranks-per-node 0: must be at least 1"),
        (("--cpus-per-node", "0"), "--cpus-per-node 0: must be at least 1"),
        (("--restarts", "-1"), "--restarts -1: must be at least 0"),
        (("--at-once", "2"), "give it with a study file or --vary"),
        (("--stage-to", "scratch"), "should begin with /"),
        (("--sbatch=mem=64G",), "--sbatch=--mem=64G"),  # sbatch would take it for the script
        (("--sbatch=--array=1-3",), "set by submit itself"),
        (("--sbatch=-N3",), "--sbatch=-N3: is set by submit itself"),
        (("--sbatch=-olog",), "--sbatch=-olog: is set by submit itself"),
        (("--sbatch=-a1-3",), "--sbatch=-a1-3: is set by submit itself"),
        (("--data.path", "none"), "none: no such folder"),
        (("--container", "no.sif"), "no.sif: no such file"),
        (("--container-image", "./no.sqsh"), "/no.sqsh: no such file"),
        (
            ("--container", "c.sif", "--container-image", "u"),
            "of Apptainer, and --container-image, of Pyxis: give one",
        ),
        (("--vary", "train.sed=1,2"), "train.seed"),
        (("--vary", "seed"), "section.key=VALUE"),
        (("--vary", "train.seed=1,1"), "two runs have train.seed=1"),
        (("--vary", "train.seed=1", "--vary", "train.seed=2"), "train.seed: is given twice"),
        (("--vary", "data.path=none,nothing"), "none: no such folder"),
        (("--partitoin", "x"), "--partitoin"),
    ],
)
def test_mistakes_are_found_before_anything_is_queued(dry_run, tmp_path, options, word):
    output = dry_run(tmp_path / "run", *options, code=2)
    assert len(output.splitlines()) == 1
    assert word in output


def test_a_run_folder_that_cannot_be_one_is_refused(dry_run, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "run" / "slurm").mkdir(parents=True)
    for name, error_message in (
        ("file", "is a file"),
        ("file/run", "file: is a file"),
        ("new/../file/deeper/run", "file: is a file"),
        ("loop", "loop: cannot be read (Too many levels of symbolic links); name another"),
        ("back\\slash", "sbatch can't write a log there"),
        ("thesis", "not empty and not a run folder"),
        ("100%", "sbatch can't write a log there"),
        ("two\nlines", "sbatch can't write a log there"),
    ):
        output = dry_run(tmp_path / name, "--nodes", "1", code=2)
        assert len(output.splitlines()) == 1
        assert error_message in output
    (tmp_path / "run" / ".lock").touch()
    dry_run(tmp_path / "run", "--nodes", "1")  # submitted before, and not started yet
    (tmp_path / "studies" / "a-run").mkdir(parents=True)
    assert "is not empty and not a run folder" in dry_run(tmp_path / "studies", "--nodes", "1", code=2)
    dry_run(tmp_path / "studies", "--vary", "train.seed=1")
    (tmp_path / "run" / "recipe.yaml").touch()
    assert "is a run folder" in dry_run(tmp_path / "run", "--vary", "train.seed=1", code=2)
    (tmp_path / "run" / "metrics.jsonl").touch()
    dry_run(tmp_path / "run", "--nodes", "1")  # to go on with it
    dry_run(tmp_path / "thesis" / "ünïcode $HOME `x`", "--nodes", "1")


def test_shipped_recipes_and_studies_are_submitted_by_name(digits, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "image.sif").touch()
    parser = Parser()
    module.add_arguments(parser)
    words = ["--data.path", str(digits), "--run-dir", str(tmp_path / "run"), "--container", "image.sif", "--dry-run"]
    for name, study_runs in (("digits/rp_mixer", 0), ("figure7-small", 6)):
        assert run_command(parser, module.submit, [name, *words]) == 0, capsys.readouterr().err
        command = shlex.split(capsys.readouterr().out.splitlines()[0])
        bound = command[command.index("--bind") + 1].split(",")
        assert all(Path(folder).is_dir() for folder in bound)
        assert any(word.startswith("--array") for word in command) == (study_runs > 0)
    assert run_command(parser, module.submit, [name, *words, "--at-once", "2"]) == 0  # the last is a study
    command = shlex.split(capsys.readouterr().out.splitlines()[0])
    assert command[command.index("--array") + 1].endswith("%2")
    for more in ([], ["--at-once", "2"]):
        assert run_command(parser, module.submit, [name, *words, "--vary", "train.seed=0,1", *more]) == 2
        assert "figure7-small is a study, which has axes of its own" in capsys.readouterr().err


def test_a_container_sees_the_recipe_and_the_stage_folder(digits, tmp_path, monkeypatch, capsys):
    recipe, image = tmp_path / "my recipes/mine.yaml", tmp_path / "image.sif"
    recipe.parent.mkdir()
    recipe.write_text((ROOT / RECIPE).read_text().replace("../base", str(ROOT / "recipes/base")))
    image.touch()
    parser = Parser()
    module.add_arguments(parser)
    words = [str(recipe), "--data.path", str(digits), "--run-dir", str(tmp_path / "run"), "--container", str(image)]
    assert run_command(parser, module.submit, [*words, "--dry-run"]) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[0])
    bound = command[command.index("--bind") + 1].split(",")
    assert {str(recipe.parent), str(digits.resolve()), str(tmp_path), os.getcwd()} <= set(bound)
    start = command.index("apptainer")
    assert command[start : command.index("--", start)] == [
        *("apptainer", "exec", "--nv", "--bind", ",".join(bound), str(image), "python3")
    ]
    lines = (ROOT / "launch/slurm/train.sbatch").read_text().splitlines()
    first = lines.index(next(line for line in lines if line.startswith('if [ -n "$stage" ]')))
    text = "\n".join(lines[first : lines.index("fi", first) + 1])
    for stage, place in (
        ("$SCRATCH/x/y", str(tmp_path)),
        ("${SCRATCH}", str(tmp_path)),
        (f"{tmp_path}/new/er", str(tmp_path)),
        ("$NOWHERE/x", "none"),
        ("/nowhere", "none"),
        ("", "none"),
    ):
        environ = {"stage": stage, "SCRATCH": str(tmp_path), "PATH": os.environ["PATH"]}
        show = ["bash", "-uc", f'{text}\necho "${{APPTAINER_BIND:-none}}"']
        assert subprocess.run(show, env=environ, capture_output=True, text=True).stdout.strip() == place, stage
        both = subprocess.run(show, env=environ | {"APPTAINER_BIND": "/mine"}, capture_output=True, text=True).stdout
        assert both.strip() == ("/mine" if place == "none" else f"/mine,{place}")


def fake(tmp_path, monkeypatch, reason: str) -> None:
    """Slurm's commands, each writing what it is called with; jobs wait for a reason."""
    (tmp_path / "bin").mkdir()
    outputs = {"sbatch": "'12;cluster'", "squeue": reason, "scancel": ""}
    scripts = {name: f'echo {name} "$@" >> {tmp_path}/calls\necho {output}' for name, output in outputs.items()}
    put_on_path(scripts, tmp_path / "bin", monkeypatch)


@pytest.mark.parametrize(
    ("reason", "code", "said"),
    [
        ("Priority", 0, "job 12; logs in"),
        ("PartitionDown", 0, "job 12 waits for the partition, which is down"),
        ("PartitionInactive", 0, "job 12 waits for the partition, which is down"),
        ("PartitionTimeLimit", 2, r"job 12 could never start \(PartitionTimeLimit\) and is cancelled"),
    ],
)
def test_a_job_that_could_never_start_is_told_at_once(digits, tmp_path, monkeypatch, capsys, reason, code, said):
    fake(tmp_path, monkeypatch, reason)
    parser = Parser()
    module.add_arguments(parser)
    words = ["recipes/digits/mixer.yaml", "--data.path", str(digits), "--run-dir", str(tmp_path / "run")]
    assert run_command(parser, module.submit, words) == code
    assert re.search(said, output := "".join(capsys.readouterr()))
    assert ("waits for" in output) == (reason not in ("Priority", "PartitionTimeLimit"))
    tried, submitted, *others = (tmp_path / "calls").read_text().splitlines()
    assert tried.replace("--test-only ", "") == submitted
    assert others[-1] == ("scancel 12" if code else "squeue --noheader --job 12 --format %r")
    (line,) = (tmp_path / "run/slurm/jobs.jsonl").read_text().splitlines()
    assert json.loads(line)["job"] == "12"
    assert " ".join(json.loads(line)["command"]) == submitted


def test_a_study_that_is_submitted_again_adds_a_job_and_keeps_its_table(digits, tmp_path, monkeypatch, capsys):
    fake(tmp_path, monkeypatch, "Priority")
    parser = Parser()
    module.add_arguments(parser)
    words = ["recipes/digits/mixer.yaml", "--data.path", str(digits), "--run-dir", str(tmp_path / "run")]
    for seeds, count in (("0,1", 2), ("5,1", 2)):
        assert run_command(parser, module.submit, [*words, "--vary", f"train.seed={seeds}"]) == 0
        assert f"job 12, {count} runs; logs in {tmp_path}/run/slurm\n" in capsys.readouterr().out
    lines = (tmp_path / "run/cells.tsv").read_text().splitlines()
    assert [line.split("\t")[-1] for line in lines] == [f"--train.seed={seed}" for seed in (0, 1, 5)]
    assert len((tmp_path / "run/slurm/jobs.jsonl").read_text().splitlines()) == 2
    kept = {Path(line.split("\t")[1]) for line in lines}
    assert kept == {*(tmp_path / "run/slurm").glob("recipe-*.yaml")}


@pytest.mark.parametrize(
    ("runs", "config", "code"),
    [
        (6, "echo 'MaxArraySize            = 6'", 2),
        (5, "echo 'MaxArraySize            = 6'", 0),
        (6, "echo 'MaxJobCount             = 5'", 0),
        (6, "echo 'no controller' >&2; exit 1", 0),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_more_runs_than_an_array_takes_are_told(digits, tmp_path, monkeypatch, capsys, runs, config, code, dry):
    fake(tmp_path, monkeypatch, "Priority")
    put_on_path({"scontrol": config}, tmp_path / "bin", monkeypatch)
    parser = Parser()
    module.add_arguments(parser)
    words = ["recipes/digits/mixer.yaml", "--data.path", str(digits), "--run-dir", str(tmp_path / "run")]
    words += ["--dry-run"] if dry else []
    assert (
        run_command(parser, module.submit, [*words, f"--vary=train.seed={','.join(map(str, range(runs)))}"]) == code
    )
    if code:
        said = "error: 6 runs: an array of Slurm's has at most 5 here (MaxArraySize 6); divide them among several"
        assert said in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def test_what_sbatch_refuses_leaves_nothing_behind(digits, tmp_path, monkeypatch, capsys):
    put_on_path({"sbatch": '[[ "$*" != *--test-only* ]] || { echo "sbatch: error: no such account"; exit 1; } >&2'},
                tmp_path, monkeypatch)  # fmt: skip
    parser = Parser()
    module.add_arguments(parser)
    words = ["recipes/digits/mixer.yaml", "--data.path", str(digits), "--run-dir", str(tmp_path / "run")]
    assert run_command(parser, module.submit, words) == 2
    assert capsys.readouterr().err == "error: sbatch failed: no such account\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ((), ["torch"]),
        (("--container", "c.sif"), []),
        (("--environment", "e.tar", "--stage-to", "/x"), []),
        (("--container-image", "ubuntu"), ["pyxis"]),
    ],
)
def test_the_torch_of_this_machine_is_looked_at_if_nodes_have_it(digits, tmp_path, monkeypatch, options, asked):
    found: list[str] = []
    monkeypatch.chdir(tmp_path)
    for name in ("c.sif", "e.tar"):
        Path(name).touch()
    monkeypatch.setattr(module, "check_torch", lambda: found.append("torch"))
    monkeypatch.setattr(module, "check_pyxis", lambda: found.append("pyxis"))
    monkeypatch.setattr(module, "run", lambda command: "12")
    monkeypatch.setattr(module, "waits_for", lambda job: "Priority")
    parser = Parser()
    module.add_arguments(parser)
    words = ["digits/mixer", "--data.path", str(digits), "--run-dir", str(tmp_path / "run"), *options]
    assert run_command(parser, module.submit, words) == 0
    assert found == asked


@pytest.mark.parametrize("reason", [
    "PartitionConfig", "PartitionTimeLimit", "PartitionNodeLimit", "BadConstraints", "InvalidAccount", "InvalidQOS",
    "AccountNotAllowed", "QOSNotAllowed", "QOSMaxCpuPerJobLimit", "AssocMaxNodePerJobLimit",
])  # fmt: skip
def test_reasons_that_do_not_pass_cancel_a_job_once_the_scheduler_has_looked(reason, monkeypatch):
    now, asked = [0.0], []

    def run(command):
        asked.append(command)
        return f"{reason}\n"

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(commands, "run", run)
    monkeypatch.setattr(commands, "time", Namespace(monotonic=lambda: now[0], sleep=sleep))
    with pytest.raises(InputError, match=rf"job 12 could never start \({reason}\) and is cancelled"):
        commands.waits_for("12")
    assert asked[-1] == ["scancel", "12"]
    assert (now[0] > 4) == (reason == "PartitionConfig")  # Slurm's first word for any of them


@pytest.mark.parametrize("reasons", [
    ["Priority"], ["Resources"], ["PartitionDown"], ["Dependency"], ["ReqNodeNotAvail,"], ["QOSMaxJobsPerUserLimit"],
    ["AssocGrpCpuLimit"], ["JobHeldUser"], [""], ["PartitionConfig", "PartitionConfig", "Resources"],
])  # fmt: skip
def test_a_job_that_may_start_is_kept_and_the_reason_for_which_it_waits_told(reasons, monkeypatch):
    told, now = iter(reasons), [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(commands, "run", lambda command: f"{next(told)}\n")
    monkeypatch.setattr(commands, "time", Namespace(monotonic=lambda: now[0], sleep=sleep))
    assert commands.waits_for("12") == reasons[-1]
    assert next(told, "all asked") == "all asked"


def test_an_error_of_slurm_is_one_line_with_its_message(tmp_path, monkeypatch):
    refusal = "echo 'sbatch: error: Invalid partition name specified' >&2\nexit 1"
    put_on_path({"sbatch": refusal}, tmp_path, monkeypatch)
    with pytest.raises(InputError, match=r"^sbatch failed: Invalid partition name specified$"):
        commands.run(["sbatch"])
    for script, said in (
        (f"echo 'sbatch: warning: x' >&2\n{refusal}", "Invalid partition"),
        ("exit 3", "exit code 3$"),
    ):
        put_on_path({"sbatch": script}, tmp_path, monkeypatch)
        with pytest.raises(InputError, match=rf"^sbatch failed: {said}"):
            commands.run(["sbatch"])
    with pytest.raises(InputError, match=r"^no-sbatch: not found"):
        commands.run(["no-sbatch"])
    put_on_path({"sbatch": "exit 3"}, tmp_path, monkeypatch)
    with pytest.raises(InputError, match=r"^sbatch failed: exit code 3$"):
        commands.run(["sbatch"])


def test_a_recipe_that_is_edited_later_changes_no_job_that_waits(digits, tmp_path, monkeypatch):
    """The job read it at each start: edited while the job ran, it ended the job at its next requeue."""
    fake(tmp_path, monkeypatch, "Priority")
    recipe = tmp_path / "mine.yaml"
    parser = Parser()
    module.add_arguments(parser)

    def submitted(folder: str, *options: str) -> str:
        recipe.write_text(RECIPE.read_text().replace("../base", str(ROOT / "recipes/base")))
        words = [str(recipe), "--data.path", str(digits), "--run-dir", str(tmp_path / folder), *options]
        assert run_command(parser, module.submit, words) == 0
        recipe.write_text("model: {}\n")
        return (tmp_path / "calls").read_text().splitlines()[-2]

    words = submitted("run", "--model.depth", "3").partition(" -- ")[2].split()
    overrides = [("data.path", str(digits)), ("model.depth", "3")]
    assert words[1:] == [f"--{name}={value}" for name, value in overrides]
    assert load_recipe(words[0]) == load_recipe(words[0], overrides) == load_recipe(RECIPE, overrides)
    submitted("runs", "--vary", "train.seed=4,5")
    for line, seed in zip((tmp_path / "runs/cells.tsv").read_text().splitlines(), (4, 5), strict=True):
        kept = line.split("\t")[1]
        assert load_recipe(kept) == load_recipe(RECIPE, [overrides[0], ("train.seed", str(seed))])


def test_a_job_submitted_from_another_one_is_told_nothing_of_that(monkeypatch):
    """sbatch hands its environment on: a run that an array's task had submitted was taken for a run of a study."""
    of_job = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_MEM_PER_NODE": "100", "SRUN_CPUS_PER_TASK": "2"}
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "g1"}
    for name, value in {**of_job, **kept}.items():
        monkeypatch.setenv(name, value)
    told = dict(line.partition("=")[::2] for line in commands.run(["env"]).splitlines())
    assert kept.items() <= told.items()
    assert not of_job.keys() & told.keys()


def test_a_stage_folder_whose_variable_the_node_lacks_is_why_the_job_ended(digits, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WIDEMIX_NONE", raising=False)
    monkeypatch.setenv(VARIABLE, "")  # to which the node adds
    logs = tmp_path / "slurm" / "7.0"
    logs.mkdir(parents=True)
    arguments = Namespace(
        stage="$WIDEMIX_NONE/x", preflight="no", logs=logs, sizes=[], addresses=[""], environment=""
    )
    arguments.logs = tmp_path / "not shared"
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    monkeypatch.setenv("SLURM_NODEID", "1")
    with pytest.raises(
        InputError, match=rf"^n3: {arguments.logs}: does not exist on this node: all nodes must share"
    ):
        _start(arguments, [])
    arguments.logs = logs
    for node in ("0", "1"):
        monkeypatch.setenv("SLURM_NODEID", node)
        monkeypatch.setenv("SLURMD_NODENAME", f"n{node}")
        with pytest.raises(InputError, match="is the variable set there"):
            _start(arguments, [str(ROOT / "recipes/digits/mixer.yaml"), f"--data.path={digits}"])
        assert (logs / f"node-{node}.started").exists()
    assert (
        _finish(Namespace(folder=tmp_path, logs=logs, ranks=2, stop_requested=False, restarts=2, nodes=[]))
        == Exit.WRONG_INPUT
    )
    verdict, after = capsys.readouterr().out.splitlines()
    given = "$WIDEMIX_NONE/x"
    reason = f"n0: --stage-to {given}: is {given} on this node; is the variable set there?"
    assert verdict == f"7.0: {reason}; 1 other node failed too"
    assert after == "7.0: step 0, 0.0 min on no node"


@pytest.fixture
def batch(tmp_path, monkeypatch):
    """Runs train.sbatch on two nodes with commands that only note their words, of which Python ends with 75.

    batch(question, unanswered) -> exit code, output, and the words. unanswered: how often Slurm's controller does not
    answer each question that begins so. excluded: the nodes without which the job is to be requeued. signals: what
    the script gets while it trains, and when that has ended. given: the script's words.
    """
    (tmp_path / "noted").mkdir()
    note = f'words="${{0##*/}} $*"; echo "$words" >>{tmp_path}/noted/words\n'
    lines = {
        "srun": f"""echo $PPID >{tmp_path}/noted/script; [ -z $FIRST ] || kill -$FIRST $PPID
            environ="$SRUN_CPUS_PER_TASK|$WIDEMIX_RANK_STATUS_DIR|$WIDEMIX_STAGE_TOKEN|$LOADED"
            echo "$environ" >{tmp_path}/noted/environ
            printf '%s\\n' "$@" >{tmp_path}/noted/started""",
        "sleep": "",
        "python": """case $2 in
            *.ports) echo 1,2,3 ;;
            *.finish) printf %s "$EXCLUDED" >"$4/excluded-nodes"; exit $CODE ;;
        esac""",
        "scontrol": f"""asked=$(grep -cFx -- "$words" {tmp_path}/noted/words)
        [[ $* != $QUESTION* || $asked -gt $UNANSWERED ]] || exit 1
        case "$1 $2" in
            "show hostnames") printf 'n1\\nn2\\n' ;;
            "show node") [ -z $SECOND ] || {{ read script <{tmp_path}/noted/script && kill -$SECOND $script; }}
                echo "NodeName=$4 NodeAddr=10.0.0.${{4#n}} State=ALLOCATED"
                [[ -z $LOST || $4 != "$SLURM_JOB_NODELIST" ]] || echo "NodeName=$LOST X=1 State=DOWN*+CLOUD" ;;
            "show job") job="JobId=7 JobState=$STATE Restarts=$RESTARTS"
                echo "$job SubmitTime=2026-11-27 ExcNodeList=$WITHOUT" ;;
        esac""",
    }
    put_on_path({name: note + text for name, text in lines.items()}, tmp_path, monkeypatch)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1", "SLURM_CPUS_ON_NODE": "4"}
    words = [str(tmp_path / "a run"), "1", "2", "100", "no", "", "", "", "", "python", "--", "digits/mixer"]

    def run(
        question: str,
        unanswered: int,
        excluded: str = "",
        signals: tuple[str, str] = ("", ""),
        given: list[str] = words,
        **changes: str,
    ):
        told = {"QUESTION": question, "UNANSWERED": str(unanswered), "EXCLUDED": excluded, "CODE": "75", "LOST": ""}
        told |= {"STATE": "RUNNING", "RESTARTS": "0", "WITHOUT": "(null)"}
        environ = os.environ | job | told | {"FIRST": signals[0], "SECOND": signals[1]} | changes
        script = ["bash", str(ROOT / "launch/slurm/train.sbatch"), *given]
        done = subprocess.run(script, env=environ, capture_output=True, text=True)
        return done.returncode, done.stdout, (tmp_path / "noted/words").read_text().splitlines()

    return run


def test_a_controller_that_is_busy_or_starts_anew_is_asked_again(batch):
    """One unanswered question left a job without its requeue, or its nodes at a wrong address for a day."""
    code, output, words = batch("", 2)
    assert code == 75
    assert output.splitlines()[-1] == "job 7 is requeued"
    assert words[-1] == "scontrol requeue 7"
    (started,) = [line for line in words if line.startswith("srun")]
    assert "--addresses 10.0.0.1,10.0.0.2 " in started


@pytest.mark.parametrize(
    ("signals", "flags"),
    [
        (("USR1", ""), ["--stop-requested"]),
        (("USR1", "TERM"), ["--stop-requested"]),
        (("TERM", ""), ["--stop-requested", "--preempted"]),
        (("", ""), []),
    ],
)
def test_a_job_that_is_preempted_is_told_from_one_at_its_time_limit(batch, signals, flags):
    _, _, words = batch("none", 0, signals=signals)
    (ended,) = [line.split() for line in words if "slurm.finish" in line]
    assert [word for word in ended if word in ("--stop-requested", "--preempted")] == flags


def test_a_requeue_is_told_also_where_the_nodes_could_not_be_excluded(batch):
    code, output, words = batch("update", 99, excluded="n3")
    assert code == 75
    assert output.splitlines()[-2:] == ["n3: could not be excluded", "job 7 is requeued"]
    assert words[-1] == "scontrol update JobId=7 ExcNodeList=n3"


@pytest.mark.parametrize(
    ("sizes", "alone"), [("", "--kill-on-bad-exit=1"), ("2,1", "--kill-on-bad-exit=0 --no-kill")]
)
def test_the_script_hands_on_the_words_of_submit(batch, tmp_path, sizes, alone):
    """Also that a node is lost only with the whole job, unless that is elastic."""
    folder = f"{tmp_path}/runs"
    words = [folder, "3", "5", "9", "report", "/disk/x", sizes, "e.tar", "export LOADED=$NOWHERE-yes", "python", "--"]
    code, output, words = batch(
        "none", 0, given=[*words, "r.yaml", "--train.seed=4"], CODE="0", SLURM_CPUS_PER_TASK="6"
    )
    assert code == 0
    assert not [line for line in words if "requeue" in line.split()]
    logs = f"{folder}/slurm/7.0"
    assert output == f"job 7, start 0: 2 nodes x 3 ranks, logs in {logs}\n"
    [started] = [line for line in words if line.startswith("srun")]
    places = "--addresses 10.0.0.1,10.0.0.2 --ports 1,2,3 --ranks 3 --restarts 5 --preflight report --stage /disk/x"
    rest = f"--sizes {sizes} --environment e.tar --logs {logs} -- r.yaml --train.seed=4 --run-dir {folder}"
    assert started == f"srun --export=ALL {alone} python -m widemix.launch.slurm.node {places} {rest}"
    [ended] = [line for line in words if "slurm.finish" in line]
    judged = f"python -m widemix.launch.slurm.finish {folder} {logs} 6 --requeues 9 --restarts 5"
    assert ended == f"{judged} --nodes n1 n2 --lost "
    cpus, status, token, loaded = (tmp_path / "noted/environ").read_text().strip().split("|")
    assert (cpus, status, loaded) == ("6", logs, "-yes")
    assert re.fullmatch("[0-9a-f]{32}", token)
    assert Path(logs, "started").exists()


def test_a_run_of_an_array_is_its_line_of_the_table(batch, tmp_path):
    """And is requeued by the array's number and its own, in a start of its own logs."""
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "cells.tsv").write_text("a\tr a.yaml\t--x.y=1\nb\tr b.yaml\t--x.y=2\t--z=p q\nc\tr c.yaml\n")
    words = [str(folder), "1", "2", "100", "no", "", "", "", "", "python", "--"]
    array = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "3", "RESTARTS": "3"}
    code, output, words = batch("none", 0, given=words, **array)
    assert (code, words[-1]) == (75, "scontrol requeue 6_2")
    started = (tmp_path / "noted/started").read_text().splitlines()
    assert started[started.index("--logs") + 1] == f"{folder}/b/slurm/7.3"
    assert started[started.index("--") + 1 :] == ["r b.yaml", "--x.y=2", "--z=p q", "--run-dir", f"{folder}/b"]
    assert output.splitlines()[-1] == "job 6_2 is requeued"
    assert (tmp_path / "noted/environ").read_text().startswith("4|")  # all CPUs of the node


@pytest.mark.parametrize(
    ("changes", "last", "requeued"),
    [
        ({"STATE": "COMPLETING"}, "job 7 is COMPLETING and not requeued: to continue, submit it again", False),
        ({"RESTARTS": "1"}, "job 7 is requeued by Slurm", False),
        ({"RESTARTS": "2", "SLURM_RESTART_COUNT": "2"}, "job 7 is requeued", True),
        ({"WITHOUT": "n7,n8"}, "job 7 is requeued", True),
    ],
)
def test_a_job_is_requeued_if_nobody_else_has_ended_or_requeued_it(batch, changes, last, requeued):
    code, output, words = batch("none", 0, excluded="n3\n", LOST="n2", **changes)
    assert (code, output.splitlines()[-1]) == (75, last)
    assert ("scontrol requeue 7" in words) is requeued
    if requeued:
        without = ",".join(["n3", *([changes["WITHOUT"]] if "WITHOUT" in changes else [])])
        assert words[-1] == f"scontrol update JobId=7 ExcNodeList={without}"
    [ended] = [line for line in words if "slurm.finish" in line]
    assert ended.endswith(" --lost n2")


def test_a_job_that_cannot_begin_says_so_before_it_trains(batch, tmp_path):
    words = [str(tmp_path / "run"), "1", "2", "100", "no", "", "", "", "false", "python", "--", "r.yaml"]
    (tmp_path / "noted/words").touch()
    assert batch("none", 0, given=words) == (2, "--setup false: failed\n", [])
    words[8:10] = ["", "no-python"]
    assert batch("none", 0, given=words) == (2, "n1 has no no-python: all nodes need it\n", [])
    assert not (tmp_path / "run").exists()


def test_a_job_whose_nodes_have_no_address_does_not_start(batch):
    code, output, words = batch("show node --oneliner n1", 99)
    assert code == 1
    assert output == "n1 n2: Slurm's controller gives no address of some of them\n"
    assert not [line for line in words if line.startswith("srun")]


@pytest.mark.parametrize(("nodes", "without"), [(2, True), (3, False)])
def test_a_faulty_node_is_kept_if_the_partition_has_too_few_others(tmp_path, monkeypatch, capsys, nodes, without):
    """Of n0 to n4, n0 and n1 are already excluded, and n3 is faulty."""
    answers = {
        "sinfo": r"printf 'n0\nn1\nn2\nn3\nn4\n'",
        "scontrol": r"""case "$*" in
            "show job --oneliner 7") echo "JobId=7 NodeList=n[2-4] ExcNodeList=n[0-1] Comment=ExcNodeList=n4" ;;
            "show hostnames n[0-1]") printf 'n0\nn1\n' ;;
            *) exit 1 ;;
        esac""",
    }
    put_on_path(answers, tmp_path, monkeypatch)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_PARTITION": "gpu", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": str(nodes)}
    assert _can_exclude(["n3"], job) is without
    kept = "n3: faulty, but kept: the partition has too few other nodes\n"
    assert capsys.readouterr().out == ("" if without else kept)
    assert not _can_exclude([], {})
    put_on_path({"sinfo": "exit 1"}, tmp_path, monkeypatch)
    assert _can_exclude(["n3"], job)  # where the controller does not answer
    monkeypatch.setenv("PATH", str(tmp_path / "container"))
    assert _can_exclude(["n3"], job)  # without Slurm's commands


def test_other_nodes_of_the_partition_are_those_that_may_be_used_each_once(monkeypatch):
    """A run of an array is asked for by the array's number and its own: its job's may stand for all of them."""
    asked = []

    def words(*command):
        asked.append(command)
        excluded = "ExcNodeList=(null) Comment=x" if len(asked) == 1 else "ExcNodeList=n4"
        jobs = ["JobId=9", *excluded.split()]
        return {"sinfo": ["n0", "n1", "n0", "n2", "n4"], "scontrol": jobs if "job" in command else ["n4"]}[command[0]]

    monkeypatch.setattr(node_module, "_words", words)
    environ = {"SLURM_JOB_ID": "9", "SLURM_JOB_PARTITION": "gpu"}
    assert node_module._count_others(["n1"], environ) == 3  # n0, n2 and n4
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    assert node_module._count_others(["n1"], environ | array) == 2
    jobs = [command[-1] for command in asked if "job" in command]
    assert jobs == ["9", "7_2"]
    [(*_, sinfo), *_] = [[command] for command in asked if command[0] == "sinfo"]
    assert {"--noheader", "--Node", "--format=%N", "--partition=gpu"} < {*sinfo}
    [states] = [word.removeprefix("--states=").split(",") for word in sinfo if word.startswith("--states=")]
    assert {*states} == {"idle", "mixed", "allocated", "completing"}  # as this job's own nodes


def test_of_faulty_nodes_that_are_kept_the_first_node_alone_tells(monkeypatch, capsys):
    monkeypatch.setattr(node_module, "_count_others", lambda faulty, environ: 2)
    for node, nodes, without in (("1", "3", False), ("1", "2", True), ("0", "3", False)):
        assert capsys.readouterr().out == ""
        assert _can_exclude(["n3", "n4"], {"SLURM_NODEID": node, "SLURM_STEP_NUM_NODES": nodes}) is without
    assert capsys.readouterr().out.startswith("n3, n4: faulty, but kept")


def end(folder, logs, requeues=100, lost=(), preempted=False):
    others = {"ranks": 1, "stop_requested": preempted, "restarts": 2, "nodes": ["n0", "n3"], "preempted": preempted}
    return _finish(Namespace(folder=folder, logs=logs, requeues=requeues, lost=lost, **others))


def start(folder, name, steps=0, code=75, resumed=None):
    """The logs of a start, whose rank ended with a code and left a checkpoint. resumed: from, if not the newest."""
    logs = folder / "slurm" / name
    logs.mkdir(parents=True)
    (logs / "started").touch()
    os.utime(logs / "started", 2 * (time.time() - 88,))
    (logs / "rank-0.json").write_text(json.dumps(asdict(RankStatus(0, "n3", code, "stopped", 1.0))))
    if steps:
        first = 1 + (saved_step(folder) if resumed is None else resumed)
        line = {"time": 1.0, "step": first, "ranks": 1, "logs": name, "seconds": {"import": 2.0}}
        with (folder / "starts.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        mark = folder / f"checkpoints/{steps:08d}/COMPLETE"
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    return logs


def test_a_job_that_saves_nothing_twice_is_not_requeued_again(tmp_path, capsys, monkeypatch):
    """Its time limit is shorter than what it takes to begin: it was requeued for ever."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    assert end(tmp_path, start(tmp_path, "7.0", steps=5)) == Exit.REQUEUE
    assert end(tmp_path, start(tmp_path, "7.1")) == Exit.REQUEUE  # once may be chance
    assert end(tmp_path, start(tmp_path, "7.2", steps=6)) == Exit.REQUEUE
    assert end(tmp_path, start(tmp_path, "7.3")) == Exit.REQUEUE
    capsys.readouterr()
    assert end(tmp_path, start(tmp_path, "7.4")) == Exit.FAILED
    assert "1.5 minutes until the signal do not suffice" in (said := capsys.readouterr().out)
    assert "submit it again with --time 8 (minutes) or more" in said
    assert end(tmp_path, start(tmp_path, "8.0")) == Exit.REQUEUE  # another job, with another limit
    assert end(tmp_path, start(tmp_path, "8.1"), lost=["n3"]) == Exit.REQUEUE  # by Slurm, whatever we say
    assert end(tmp_path, start(tmp_path, "8.2", steps=6, code=0)) == Exit.DONE


def test_a_job_that_is_preempted_before_it_saves_is_requeued_however_often(tmp_path, capsys):
    """The second time in a row ended it, with the advice to ask for more time."""
    for number in range(3):
        assert end(tmp_path, start(tmp_path, f"7.{number}"), preempted=True) == Exit.REQUEUE
    for number in (3, 4):  # nor do these count where others have saved nothing
        (logs := start(tmp_path, f"7.{number}")).joinpath("rank-0.json").unlink()
        assert end(tmp_path, logs, preempted=number == 3) == Exit.REQUEUE
    said = capsys.readouterr().out
    assert "submit it again" not in said
    assert [line[:3] for line in said.splitlines() if "failed before it ran Python" in line] == ["7.4"]
    assert end(tmp_path, logs := start(tmp_path, "6.0", steps=5), preempted=True) == Exit.REQUEUE
    assert json.loads((logs / "summary.json").read_text())["new_steps"] == 5
    assert end(tmp_path, start(tmp_path, "7.5"), preempted=True, requeues=5) == Exit.FAILED


def test_what_a_start_has_saved_is_counted_from_where_it_resumed(tmp_path, capsys):
    """Not from what an earlier job had saved and someone removed, nor from a checkpoint that was damaged."""
    assert end(tmp_path, start(tmp_path, "100.0", steps=1000)) == Exit.REQUEUE
    shutil.rmtree(tmp_path / "checkpoints")
    for name, steps in (("101.0", 40), ("101.1", 80)):
        assert end(tmp_path, start(tmp_path, name, steps=steps)) == Exit.REQUEUE
        assert "stopped by a signal, with a checkpoint" in capsys.readouterr().out
    (tmp_path / "checkpoints/00000080/COMPLETE").rename(tmp_path / "checkpoints/00000080/DAMAGED")
    assert end(tmp_path, start(tmp_path, "101.2", steps=60, resumed=40)) == Exit.REQUEUE
    assert "with a checkpoint" in capsys.readouterr().out
    assert end(tmp_path, start(tmp_path, "101.3")) == Exit.REQUEUE
    assert "without a new checkpoint" in capsys.readouterr().out
    assert end(tmp_path, start(tmp_path, "101.4")) == Exit.FAILED


def test_what_torchruns_ranks_saved_before_a_restart_counts(tmp_path, capsys):
    logs = start(tmp_path, "7.0", steps=5)
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write(json.dumps({"time": 2.0, "step": 6, "ranks": 1, "logs": "7.0", "seconds": {}}) + "\n")
    assert end(tmp_path, logs) == Exit.REQUEUE
    assert "stopped by a signal, with a checkpoint" in (said := capsys.readouterr().out)
    assert "first step after 2.0 s: import 2.0" in said  # of the job, not of what was started again


def test_after_training_elsewhere_a_start_that_saves_nothing_has_saved_nothing(tmp_path, capsys):
    (tmp_path / "checkpoints/00000500").mkdir(parents=True)
    (tmp_path / "checkpoints/00000500/COMPLETE").touch()
    (tmp_path / "checkpoints/00000900.old").mkdir()
    (tmp_path / "checkpoints/00000900.old/COMPLETE").touch()  # which somebody has put aside
    elsewhere = {"time": 1.0, "step": 1, "ranks": 1, "seconds": {}}
    (tmp_path / "starts.jsonl").write_text(json.dumps(elsewhere) + "\n")
    assert saved_step(tmp_path) == 500
    assert end(tmp_path, start(tmp_path, "7.0")) == Exit.REQUEUE
    assert "without a new checkpoint" in capsys.readouterr().out
    assert end(tmp_path, start(tmp_path, "7.1")) == Exit.FAILED


def test_a_job_is_requeued_so_often_and_no_more(tmp_path):
    ends = [end(tmp_path, start(tmp_path, f"7.{number}", steps=number + 1), requeues=2) for number in range(3)]
    assert ends == [Exit.REQUEUE, Exit.REQUEUE, Exit.FAILED]


def test_torn_files_of_other_starts_and_ranks_end_no_verdict(tmp_path, capsys):
    for name, text in (("7.0", ""), ("7.1", '{"step": '), ("7.2", "[]"), ("7.3", '{"step": null, "code": 75}')):
        (start(tmp_path, name) / "summary.json").write_text(text)
    logs = start(tmp_path, "7.4", steps=9)
    (logs / "rank-1.json").write_text("")
    assert end(tmp_path, logs) == Exit.REQUEUE
    assert capsys.readouterr().out.count("summary.json: is damaged, and ignored") == 4
    (logs / "rank-0.json").write_text('{"rank": 0')
    assert [status.code for status in read_rank_statuses(logs)] == [None, None]
    assert end(tmp_path, logs) == Exit.REQUEUE
    assert "rank 0 on a host unknown was killed" in capsys.readouterr().out


def test_a_port_that_is_in_use_is_passed_over():
    job = 50_000 + os.getpid()
    ports = free_ports(job)
    with socket.create_server(("127.0.0.1", ports["train"])):
        others = free_ports(job)
    assert others["train"] not in ports.values()
    assert {use: port for use, port in others.items() if use != "train"} == {
        use: port for use, port in ports.items() if use != "train"
    }
    assert free_ports(job) == ports


def test_a_port_is_free_as_soon_as_its_server_has_ended():
    """Though the kernel still waits for what may come on its connections, as after a job that was requeued."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)) as client:
        assert not _is_free(port)
        connection, _ = server.accept()
        connection.close()  # the one that closes first waits
        assert client.recv(1) == b""
    assert _is_free(port)


def test_a_port_that_is_in_use_on_ipv6_alone_is_not_free():
    port = free_port()
    try:
        server = socket.create_server(("::1", port), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server:
        assert not _is_free(port)
    assert _is_free(port)


def test_uses_of_a_job_never_meet_and_a_node_without_free_ports_is_told(monkeypatch):
    """Each goes on in steps of its own; after the last port comes the first."""
    busy = {31_999, 31_998, 31_997, 20_000, 20_002}
    monkeypatch.setattr(ports_module, "_is_free", lambda port: port not in busy)
    job = next(job for job in range(12_000) if ports_module.job_port(job, "rendezvous") == 31_999)
    assert free_ports(job) == {"train": 20_003, "preflight": 20_001, "rendezvous": 20_005}
    monkeypatch.setattr(ports_module, "_is_free", lambda port: False)
    with pytest.raises(RunError, match=r"^this node has no free port from 20000 to 31999$"):
        free_ports(1)


def test_only_a_start_that_trained_nothing_excludes_nodes(tmp_path):
    for start, trained in enumerate((False, True)):
        logs = tmp_path / "slurm" / f"7.{start}"
        logs.mkdir(parents=True)
        (logs / "faulty-nodes").write_text("n3\n")
        if trained:
            (logs / "rank-0.json").write_text(json.dumps(asdict(RankStatus(0, "n3", 75, "stopped", 1.0))))
        assert end(tmp_path, logs) == Exit.REQUEUE
        assert (logs / "excluded-nodes").exists() is not trained
    assert (tmp_path / "slurm/7.0/excluded-nodes").read_text() == "n3\n"


def test_a_job_that_slurm_gives_the_excluded_nodes_again_is_not_requeued_for_ever(tmp_path, capsys):
    for number, (faulty, code) in enumerate((("n3", Exit.REQUEUE), ("n3 n4", Exit.REQUEUE), ("n4", Exit.FAILED))):
        logs = tmp_path / "slurm" / f"7.{number}"
        logs.mkdir(parents=True)
        (logs / "faulty-nodes").write_text(faulty)
        assert end(tmp_path, logs) == code
    assert "faulty nodes that were excluded before: n4; not requeued" in capsys.readouterr().out
    (logs / "excluded-nodes").unlink(missing_ok=True)
    assert end(tmp_path, logs.rename(logs.with_name("8.0"))) == Exit.REQUEUE


@pytest.mark.parametrize("sizes", [[], [2, 4]])
def test_a_task_of_srun_reads_the_words_of_train_sbatch(monkeypatch, sizes):
    started, train = [], ["digits/mixer.yaml", "--train.seed=3", "--run-dir", "a run"]
    words = ["--addresses", "10.0.0.1,fd00::2", "--ports", "20001,20002,20003", "--ranks", "2", "--restarts", "3"]
    words += ["--preflight", "no", "--stage", "", "--sizes", ",".join(map(str, sizes)), "--environment", "a.tar"]
    monkeypatch.setattr(node_module.sys, "argv", ["node", *words, "--logs", "a run/logs", "--", *train])
    monkeypatch.setattr(node_module, "_start", lambda *given: started.append(given) or Exit.DONE)
    with pytest.raises(SystemExit) as ended:
        node_module.main()
    assert ended.value.code == 0
    [(arguments, rest)] = started
    assert rest == train
    assert vars(arguments) == {
        "addresses": ["10.0.0.1", "fd00::2"],
        "ports": {"train": 20001, "preflight": 20002, "rendezvous": 20003},
        "ranks": 2,
        "restarts": 3,
        "preflight": "no",
        "stage": "",
        "sizes": sizes,
        "environment": "a.tar",
        "logs": Path("a run/logs"),
        "overrides": [],
    }


@pytest.mark.parametrize("exclude", [False, True])
def test_the_preflight_runs_the_doctor_on_all_ranks_and_names_whom_it_found(monkeypatch, tmp_path, exclude):
    given, found = [], []
    arguments = Namespace(preflight="exclude" if exclude else "report", logs=tmp_path)
    words = ["of", "torchrun"]
    monkeypatch.setattr(node_module, "torchrun_command", lambda *own, **more: given.append((own, more)) or words)

    def run(command, env, **options):
        found.append((command, env, options["check"]))
        if exclude:
            (tmp_path / "faulty-nodes").write_text("n1 n3")

    monkeypatch.setattr(node_module.subprocess, "run", run)
    monkeypatch.setenv("WIDEMIX_RANK_STATUS_DIR", "of the ranks that train")
    assert node_module._preflight(arguments, Path("/data")) == (["n1", "n3"] if exclude else [])
    [((own, program, environ), options)] = given
    words = ["widemix", "doctor", "--cluster", "--data", "/data"]
    assert program == words + (["--exclude", str(tmp_path / "faulty-nodes")] if exclude else [])
    assert (own, environ, options) == (arguments, os.environ, {"use": "preflight"})
    [(command, environ, checked)] = found
    assert command == [sys.executable, "-m", "torch.distributed.run", "of", "torchrun"]
    assert environ == {name: value for name, value in os.environ.items() if name != "WIDEMIX_RANK_STATUS_DIR"}
    assert not checked


def test_the_last_command_of_a_job_reads_the_words_of_train_sbatch(monkeypatch, capsys):
    ended, words = [], ["a run", "a run/logs", "8"]
    monkeypatch.setattr(finish_module, "_finish", lambda given: ended.append(vars(given)) or Exit.REQUEUE)
    several = ["--requeues", "3", "--nodes", "n0 n1", "--lost", "n2 n3", "--restarts", "5"]
    for more in ([], [*several, "--stop-requested", "--preempted"]):
        monkeypatch.setattr(finish_module.sys, "argv", ["finish", *words, *more])
        with pytest.raises(SystemExit) as code:
            finish_module.main()
        assert code.value.code == Exit.REQUEUE
    places = {"folder": Path("a run"), "logs": Path("a run/logs"), "ranks": 8, "overrides": []}
    rest = {"requeues": 100, "nodes": [], "lost": [], "restarts": 2, "stop_requested": False, "preempted": False}
    other = {"requeues": 3, "nodes": ["n0", "n1"], "lost": ["n2", "n3"], "restarts": 5}
    assert ended == [places | rest, places | other | {"stop_requested": True, "preempted": True}]


def test_a_jobs_ports_are_printed_for_train_sbatch(monkeypatch, capsys):
    job = 40_000 + os.getpid()
    monkeypatch.setattr(ports_module.sys, "argv", ["ports", str(job)])
    with pytest.raises(SystemExit) as code:
        ports_module.main()
    assert code.value.code == 0
    assert capsys.readouterr().out == "{train},{preflight},{rendezvous}\n".format(**free_ports(job))


def test_blocks_are_handed_on_between_machines(monkeypatch):
    """Two nodes of one machine would ask themselves."""
    monkeypatch.setattr(node_module, "route_from", lambda host: "10.0.0.9")
    arguments = Namespace(stage="/disk", addresses=["10.0.0.7", "10.0.0.8", "10.0.0.9"], ports={"train": 20001})
    environ = {"WIDEMIX_STAGE_TOKEN": "secret"}
    relays = [node_module._relay(arguments, environ | {"SLURM_NODEID": str(node)}) for node in range(3)]
    assert all(isinstance(relay, Relay) for relay in relays)
    assert [relay.neighbour and relay.neighbour.address for relay in relays] == [None, "10.0.0.7", "10.0.0.8"]
    monkeypatch.setattr(node_module, "route_from", lambda host: host)
    for words, node in ((environ, "1"), ({}, "0")):
        assert not isinstance(node_module._relay(arguments, words | {"SLURM_NODEID": node}), Relay)
    monkeypatch.setattr(node_module, "route_from", lambda host: "10.0.0.9")
    for changes in ({"stage": ""}, {"addresses": ["10.0.0.7"]}):
        alone = Namespace(**vars(arguments) | changes)
        assert not isinstance(node_module._relay(alone, environ | {"SLURM_NODEID": "0"}), Relay)


def test_nodes_hand_on_by_the_jobs_token_and_a_port_that_torchrun_does_not_need_yet(monkeypatch):
    made = []
    monkeypatch.setattr(node_module, "route_from", lambda host: "10.0.0.9")
    monkeypatch.setattr(node_module, "Neighbour", lambda *given: made.append(given) or "neighbour")
    monkeypatch.setattr(node_module, "Relay", lambda *given: made.append(given))
    ports = {"train": 20001, "preflight": 20002, "rendezvous": 20003}
    arguments = Namespace(stage="/disk", addresses=["10.0.0.7", "10.0.0.8"], ports=ports)
    for node in ("0", "1"):
        node_module._relay(arguments, {"WIDEMIX_STAGE_TOKEN": "secret", "SLURM_NODEID": node})
    assert made == [(None, 20001, "secret"), ("10.0.0.7", 20001, "secret"), ("neighbour", 20001, "secret")]


def test_nodes_wait_for_the_last_however_long_it_stages_and_say_for_which(monkeypatch, capsys):
    monkeypatch.setattr(node_module, "TELL_AFTER_S", 0.2)
    job = 40_000 + os.getpid()
    arguments = Namespace(addresses=["127.0.0.1", "10.0.0.2", "10.0.0.3"], ports=free_ports(job))
    places = [{"SLURM_NODEID": str(n), "SLURM_JOB_ID": str(job), "SLURM_STEP_NUM_NODES": "3"} for n in range(3)]
    with ThreadPoolExecutor() as pool:
        early = [
            pool.submit(wait_for_all_nodes, arguments, places[1]),
            pool.submit(wait_for_all_nodes, arguments, places[0]),
        ]
        assert not wait(early, timeout=1.0).done
        assert "all nodes wait for 10.0.0.3, which has not started or still stages\n" in capsys.readouterr().out
        last = pool.submit(wait_for_all_nodes, arguments, places[2])
        assert [future.result(300).get("all") for future in (*early, last)] == [b"here"] * 3


@pytest.mark.parametrize("node", ["0", "1"])
def test_the_first_node_says_ever_more_rarely_for_which_all_wait_and_lets_all_go(node, monkeypatch, capsys):
    now, kept = [0.0], {}

    def sleep(seconds):
        now[0] += seconds

    def check(keys):
        assert node == "0"
        return now[0] >= {"here 0": 0, "here 1": 100, "here 2": 500}[keys[0]]

    store = Namespace(set=kept.__setitem__, check=check, wait=lambda keys: kept.update(waited=keys))
    monkeypatch.setattr(node_module, "_open_store", lambda *_: store)
    monkeypatch.setattr(node_module, "time", Namespace(monotonic=lambda: now[0], sleep=sleep))
    place = {"SLURM_NODEID": node, "SLURM_STEP_NUM_NODES": "3"}
    assert wait_for_all_nodes(Namespace(addresses=["n0", "n1", "n2"]), place) is store
    assert kept == {f"here {node}": "", "waited": ["all"]} | ({"all": "here"} if node == "0" else {})
    told = [line.partition("wait for ")[2].partition(", which")[0] for line in capsys.readouterr().out.splitlines()]
    assert told == (["n1, n2", "n2", "n2", "n2"] if node == "0" else [])  # after 60, 120, 240 and 480 s


def test_a_node_of_an_elastic_job_trains_again_after_a_rank_has_failed(tmp_path, monkeypatch, digits):
    commands, job = [], 50_000 + os.getpid()

    def fail_once(command):
        commands.append(command)
        if len(commands) == 1:
            raise ChildFailedError("train", {0: ProcessFailure(0, 1, 1, "none")})

    monkeypatch.setattr(node_module, "run_torchrun", fail_once)
    for name, value in (("NODEID", "0"), ("JOB_ID", str(job)), ("STEP_NUM_NODES", "1")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    arguments = Namespace(
        addresses=["127.0.0.1"], ports=free_ports(job), logs=tmp_path, ranks=2, restarts=1,
        sizes=[1], stage="", environment=None,
    )  # fmt: skip
    assert _start(arguments, [str(RECIPE), "--data.path", str(digits)]) == Exit.DONE
    assert [command[command.index("--rdzv-id") + 1] for command in commands] == [f"train-{job}-0-{n}" for n in (0, 1)]
    assert commands[1][-3:] == ["--data.path", str(digits), f"--data.path={digits}"]
    assert json.loads((tmp_path / "node-0.json").read_text()) == commands[1]


def finish(study_run, folder):
    """A finished run."""
    run = folder / study_run.name
    run.mkdir()
    (run / "recipe.yaml").write_text(dump_recipe(study_run.recipe))
    (run / "done.json").write_text('{"top1": 50.0}')


def test_cells_are_the_product_and_keep_their_lines(tmp_path):
    study_runs = cross(RECIPE, ["train.seed=0,1", "augment.scale=[0.1, 1],[0.5, 1]", "optim.lr=1e-3"])
    names = [study_run.name.rpartition("_")[0] for study_run in study_runs[:2]]
    assert names == ["digits-mixer_seed-0_scale-0.1_1_lr-1e-3", "digits-mixer_seed-0_scale-0.5_1_lr-1e-3"]
    assert study_runs[1].overrides == (("train.seed", "0"), ("augment.scale", "[0.5, 1]"), ("optim.lr", "1e-3"))
    profiles = [study_run.recipe.train.profile for study_run in cross(RECIPE, ["train.profile=20:30,1:40"])]
    assert profiles == ["20:30", "1:40"]  # once 1230 and 100, YAML 1.1's numbers to the base of 60
    folders = [study_run.recipe.data.path for study_run in cross(RECIPE, ["data.path=2020-01-01,'2020-13-01',b"])]
    assert folders == ["2020-01-01", "2020-13-01", "b"]  # the first ended in a traceback, as a date
    two, zero = cross(RECIPE, ["train.seed=2,0"])
    (tmp_path / "cells.tsv").write_text("".join(f"{line}\n" for line in merge(tmp_path, [two, zero])))
    wider = cross(RECIPE, ["train.seed=0,1,2"])
    lines = merge(tmp_path, wider)
    assert lines == [
        f"{study_run.name}\t{kept_path(tmp_path, study_run.recipe)}\t--train.seed={seed}"
        for study_run, seed in zip([two, zero, wider[1]], (2, 0, 1), strict=True)
    ]
    finish(wider[0], tmp_path)
    assert unfinished(tmp_path, lines, wider) == [1, 3]
    assert unfinished(tmp_path, lines, wider[1:2]) == [3]


@pytest.mark.parametrize("cut", ['"a\tb"', "a\nb", "a\u2028b"])
def test_a_value_that_would_be_cut_in_the_table_is_refused(tmp_path, cut):
    with pytest.raises(InputError, match="a job's values have no tab and no line break"):
        merge(tmp_path, cross(RECIPE, ["train.seed=0,1"], [("data.path", cut)]))


def test_cells_of_another_recipe_are_not_done(tmp_path):
    """They once were: only the varied values were in the name of a run folder."""
    for study_run in cross(RECIPE, ["train.seed=0,1"]):
        finish(study_run, tmp_path)
    same = cross(RECIPE, ["train.seed=0,1"], [("log.every", "3")])
    other = cross(RECIPE, ["train.seed=0,1"], [("optim.lr", "1e-2")])
    wider = cross(RECIPE.with_name("rp_mixer.yaml"), ["train.seed=0,1"])
    lines = merge(tmp_path, [*same, *other, *wider])
    assert unfinished(tmp_path, lines, [*same, *other, *wider]) == [3, 4, 5, 6]


def test_a_study_file_is_an_array_of_its_cells(tmp_path, digits, capsys):
    study = tmp_path / "study.yaml"
    text = "title: t\nsource: s\nclaim: c\nseeds: [0, 1]\nset: {data.path: DATA}\nfigure: {x: width}\nruns:\n"
    text += "- {label: a, recipes: {Digits: RECIPE}, axes: {model.channels: [8, 16]}}\n"
    study.write_text(text.replace("DATA", str(digits)).replace("RECIPE", str(RECIPE)))
    parser = Parser()
    module.add_arguments(parser)
    words = [str(study), "--run-dir", str(tmp_path / "runs"), "--dry-run", "--nodes", "1", "--log.every", "2"]
    assert run_command(parser, module.submit, words) == 0
    command, note, *table = capsys.readouterr().out.splitlines()[:6]
    assert "--array 1-4" in command
    assert shlex.split(command)[-1] == "--"  # each line of the table has its recipe
    assert note == "# cells.tsv"
    rows = [line.split("\t") for line in table]
    assert all(row[1].startswith(f"{tmp_path}/runs/slurm/recipe-") for row in rows)
    assert all(row[2:4] == [f"--data.path={digits}", "--log.every=2"] for row in rows)
    assert [row[4:] for row in rows[1:3]] == [
        ["--model.channels=8", "--train.seed=1"],
        ["--model.channels=16", "--train.seed=0"],
    ]
    assert run_command(parser, module.submit, [*words, "--vary", "train.seed=1"]) == 2
    assert "is a study, which has axes of its own" in capsys.readouterr().err


def test_ranges_expand_to_the_numbers():
    for numbers in ([1], [1, 2, 3, 7], [2, 4, 5, 9, 10, 11]):
        found = []
        for part in ranges(numbers).split(","):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
        assert found == numbers


def test_queued_jobs_are_not_submitted_again(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "run", lambda command: "12_1\n12_3\n13_1\n9_N/A\n")
    assert commands.queued(tmp_path) == []
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "jobs.jsonl").write_text(json.dumps({"job": "12", "command": []}) + "\n")
    assert commands.queued(tmp_path) == ["12_1", "12_3"]
    with (tmp_path / "slurm" / "jobs.jsonl").open("a") as file:
        file.write(json.dumps({"job": "9", "command": []}) + "\n")
    asked = []
    monkeypatch.setattr(commands, "run", lambda command: asked.append(command) or "12_1\n9_N/A\n99_1\n")
    assert commands.queued(tmp_path) == ["12_1", "9_N/A"]
    [squeue] = asked
    assert {"--noheader", "--array"} < {*squeue}  # a line for each run
    user, form = (squeue[squeue.index(option) + 1] for option in ("--user", "--format"))
    assert (user, form) == (getpass.getuser(), "%F_%K")


def test_runs_that_are_queued_running_or_done_are_not_submitted_again(dry_run, tmp_path, monkeypatch):
    """Of four, one is done, one queued and one of another job; by their lines in the table, which stay."""
    seeds, folder = ("--vary", "train.seed=0,1,2,3"), tmp_path / "run"
    assert "--array 1-4 " in dry_run(folder, *seeds)
    study_runs = cross(RECIPE, ["train.seed=0,1,2,3"], [("data.path", load_recipe_path(dry_run(folder, *seeds)))])
    (folder / "slurm").mkdir(parents=True)
    (folder / "slurm" / "jobs.jsonl").write_text(json.dumps({"job": "12", "command": []}) + "\n")
    finish(study_runs[0], folder)
    queue = {"12_2", "13_3"}
    monkeypatch.setattr(commands, "run", lambda command: "".join(f"{job}\n" for job in queue))
    assert "--array 3-4 " in dry_run(folder, *seeds)
    assert "--array 3-4%2 " in dry_run(folder, *seeds, "--at-once", "2")
    queue |= {"12_3", "12_4"}
    output = dry_run(folder, *seeds, code=2)
    assert output == f"error: {folder}: of 4 runs 3 are queued or running, the others done\n"


def load_recipe_path(output: str) -> str:
    """The data that a dry run names in its table."""
    return re.search(r"--data\.path=(\S+)", output)[1]


@pytest.mark.parametrize("study", [(), ("--vary", "train.seed=1")])
def test_a_folder_with_a_queued_job_takes_no_other(dry_run, tmp_path, monkeypatch, study):
    (tmp_path / "run" / "slurm").mkdir(parents=True)
    (tmp_path / "run" / "slurm" / "jobs.jsonl").write_text(json.dumps({"job": "12", "command": []}) + "\n")
    monkeypatch.setattr(commands, "run", lambda command: "12_N/A\n")
    output = dry_run(tmp_path / "run", *study, code=2)
    assert output == f"error: {tmp_path / 'run'}: job 12 is queued or running there\n"


def status(rank: int, code: int | None, message: str = "", time: float = 0.0) -> RankStatus:
    return RankStatus(rank, f"n{rank}", code, message, time)


@pytest.mark.parametrize(
    ("statuses", "stop_requested", "new_steps", "code", "reason"),
    [
        ([status(0, 0), status(1, 0)], False, 9, Exit.DONE, "done"),
        ([status(0, 0), status(1, None)], True, 9, Exit.DONE, "done"),
        ([status(0, 75), status(1, 75)], True, 9, Exit.REQUEUE, "stopped by a signal, with a checkpoint"),
        (
            [status(0, 75), status(1, None)],
            False,
            0,
            Exit.REQUEUE,
            "stopped by a signal, without a new checkpoint",
        ),
        ([status(0, None), status(1, None)], True, 0, Exit.REQUEUE, "before the last checkpoint was complete"),
        ([], True, 0, Exit.REQUEUE, "stopped by a signal, before any rank started"),
        ([status(0, 1), status(1, 2, "disk full")], True, 9, Exit.WRONG_INPUT, r"\(rank 1\): disk full"),
        ([status(0, 1, "lost n1", 5), status(1, None)], False, 9, Exit.REQUEUE, "rank 1 on n1 was killed"),
        (
            [status(0, 1, "lost n1", 5), status(1, 1, "nan", 4)],
            False,
            0,
            Exit.FAILED,
            "rank 1 on n1 failed first: nan",
        ),
        ([status(0, None)], False, 0, Exit.FAILED, "1 of 2 ranks never started"),
        ([status(1, 0)], False, 0, Exit.FAILED, "^1 of 2 ranks never started; this start saved nothing and another"),
        (
            [status(1, 75, "stopped")],
            False,
            3,
            Exit.REQUEUE,
            "^1 of 2 ranks .* first: stopped; this start saved 3 steps",
        ),
        ([status(0, 0), status(1, 2, "no")], False, 9, Exit.WRONG_INPUT, r"^the input is wrong \(rank 1\): no$"),
        ([status(0, 75), status(1, 75)], False, -1, Exit.REQUEUE, "^stopped by a signal, without a new checkpoint$"),
        (
            [status(0, 1, "nan. In block 3", 7), status(1, 1, "lost n0", 8)],
            False,
            0,
            Exit.FAILED,
            "^rank 0 on n0 failed first: nan; this",
        ),
        ([], False, 0, Exit.FAILED, "^no rank started: see the log"),
    ],
)
def test_the_verdict(statuses, stop_requested, new_steps, code, reason):
    verdict = judge(statuses, 2, stop_requested, new_steps, crashed=True)
    assert verdict.code == code
    assert re.search(reason, "; ".join(verdict.lines))


def test_of_many_killed_ranks_four_are_named():
    verdict = judge([status(rank, None) for rank in range(6)], 6, False, 0, crashed=False)
    assert [line.split(" was killed")[0] for line in verdict.lines[:-1]] == [f"rank {n} on n{n}" for n in range(4)]
    assert verdict.lines[-1] == "this start saved nothing: requeued once, since a node may have failed"
    assert not verdict.stopped


@pytest.mark.parametrize("stop_requested", [False, True])  # as Slurm tells it to stop, if it comes to that
@pytest.mark.parametrize(("new_steps", "then"), [(9, "saved 9 steps"), (0, "saved nothing: requeued once")])
def test_a_node_that_slurm_has_lost_is_why_a_job_ended(stop_requested, new_steps, then):
    ended = [status(0, 1, "connection reset"), status(1, None)]
    for statuses in (ended, []):
        verdict = judge(statuses, 2, stop_requested, new_steps, crashed=True, lost=["n1"])
        assert verdict.code == Exit.REQUEUE
        assert not verdict.stopped
        assert "; ".join(verdict.lines).startswith(f"Slurm has lost n1; this start {then}")
    assert judge([status(0, 0), status(1, None)], 2, stop_requested, 9, False, ["n1"]).code == Exit.DONE


def test_a_start_without_progress_is_requeued_once_unless_its_ranks_crashed_as_often_as_they_may(tmp_path, capsys):
    """A node that failed while it staged, or before the first checkpoint of a start, once ended the job for good."""

    def lost(name: str, attempts: int) -> Exit:
        logs = start(tmp_path, name, code=None)
        (logs / "node-1/train/attempt_0").mkdir(parents=True)  # where torchrun has noticed less
        for number in range(attempts):
            (logs / f"node-0/train-{name}/attempt_{number}").mkdir(parents=True)
            (logs / f"node-0/preflight-{name}/attempt_{number}").mkdir(parents=True)
            (logs / f"node-0/train-{name}/log_{number}").mkdir(parents=True)
        if not attempts:
            (logs / "rank-0.json").unlink()
        return end(tmp_path, logs)

    assert end(tmp_path, start(tmp_path, "7.0", steps=5)) == Exit.REQUEUE
    assert lost("7.1", attempts=0) == Exit.REQUEUE
    assert "no rank started" in (said := capsys.readouterr().out)
    assert "requeued once, since a node may have failed" in said
    assert "n0, n3: failed before it ran Python, has none, or does not share the run folder" in said
    assert lost("7.2", attempts=0) == Exit.FAILED
    assert "the run folder; this start and the one before saved nothing: not requeued" in capsys.readouterr().out
    assert lost("8.0", attempts=1) == Exit.REQUEUE
    assert lost("9.0", attempts=3) == Exit.FAILED
    assert "another would fail too" in capsys.readouterr().out
    assert lost("10.0", attempts=2) == Exit.REQUEUE


def test_the_start_before_is_the_latest_of_the_same_job(tmp_path):
    """Not the last by name, nor one of a job whose number begins alike."""

    def earlier(name: str, seconds: int, **changes) -> None:
        (tmp_path / "slurm" / name).mkdir(parents=True)
        path = tmp_path / "slurm" / name / "summary.json"
        path.write_text(json.dumps({"step": 5, "code": 75, "new_steps": 5} | changes))
        os.utime(path, (seconds, seconds))

    earlier("7.9", 100, new_steps=0)
    earlier("7.10", 200)
    earlier("70.0", 300, new_steps=0)
    assert end(tmp_path, start(tmp_path, "7.11")) == Exit.REQUEUE
    assert end(tmp_path, start(tmp_path, "7.12")) == Exit.FAILED
    earlier("8.0", 100, new_steps=0, code=1)  # which was not requeued
    assert end(tmp_path, start(tmp_path, "8.1")) == Exit.REQUEUE
    earlier("9.0", 100, new_steps=None)
    assert end(tmp_path, start(tmp_path, "9.1")) == Exit.REQUEUE
    assert end(tmp_path, start(tmp_path, "70.1"), requeues=1) == Exit.FAILED  # the second in a row


def test_a_start_leaves_a_summary_and_says_it(tmp_path, capsys, monkeypatch):
    now = 1_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    logs = start(tmp_path, "7.0", steps=40, code=0)
    os.utime(logs / "started", 2 * (now - 90,))
    for number, (rank, seconds) in enumerate(((1, 80), (2, 70))):
        (logs / f"node-{number}.json").touch()
        os.utime(logs / f"node-{number}.json", 2 * (now - seconds,))
        (logs / f"rank-{rank}.json").write_text(json.dumps(asdict(status(4 - rank, 0))))
    (tmp_path / "done.json").write_text('{"top1": 61.25, "seconds": 12.5}')
    assert end(tmp_path, logs) == Exit.DONE
    summary = {"code": 0, "why": ["done"], "step": 40, "hosts": ["n2", "n3"], "new_steps": 40, "minutes": 1.5}
    summary |= {"top1": 61.25, "seconds": 12.5, "first_step": {"import": 2.0}}
    assert json.loads((logs / "summary.json").read_text()) == summary
    said = ["done", "step 40, 1.5 min on n2, n3, top-1 61.25 %", "first step after 2.0 s: import 2.0"]
    assert capsys.readouterr().out.splitlines() == [f"7.0: {line}" for line in said]
    logs = start(tmp_path, "7.1", steps=50)  # done.json is of an earlier start
    (logs / "started").unlink()
    (logs / "node-0.json").touch()
    os.utime(logs / "node-0.json", 2 * (now - 30,))
    assert end(tmp_path, logs) == Exit.REQUEUE
    found = json.loads((logs / "summary.json").read_text())
    assert (found["code"], found["step"], found["new_steps"], found["minutes"]) == (75, 50, 10, 0.5)
    assert found["hosts"] == ["n3"]
    assert not {"top1", "seconds"} & found.keys()
    capsys.readouterr()

    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(finish_module, "atomic_write", full)
    assert end(tmp_path, start(tmp_path, "8.0", steps=60)) == Exit.REQUEUE  # the verdict counts all the same
    assert re.search(r"8\.0/summary\.json: not written \(No space left on device\)\n8\.0: s", capsys.readouterr().out)


def test_why_nodes_ended_before_they_trained_is_told_with_how_many_others(tmp_path, capsys):
    for errors, more in ((1, ""), (2, "; 1 other node failed too"), (4, "; 3 other nodes failed too")):
        logs = tmp_path / f"slurm/{errors}.0"
        logs.mkdir(parents=True)
        for node in range(errors):
            (logs / f"node-{node}.error").write_text(f"n{node}: no disk\n")
        assert end(tmp_path, logs) == Exit.WRONG_INPUT
        assert capsys.readouterr().out.splitlines()[0] == f"{errors}.0: n0: no disk{more}"
        summary = json.loads((logs / "summary.json").read_text())
        assert (summary["new_steps"], "first_step" in summary) == (None, False)


@pytest.mark.parametrize(("head", "endpoint"), [("127.0.0.1", "127.0.0.1:20015"), ("::1", "[::1]:20015")])
def test_torchrun_is_given_numbers_not_names(tmp_path, head, endpoint):
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import parse_args

    arguments = Namespace(addresses=[head, head], ranks=4, restarts=2, logs=tmp_path, ports={"train": 20015})
    environ = {"SLURM_NODEID": "1", "SLURM_JOB_ID": "12005", "SLURM_STEP_NUM_NODES": "3"}
    parsed = parse_args(torchrun_command(arguments, ["widemix", "train", "r.yaml"], environ))
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_conf) == ("3", "4", "is_host=0")
    assert parsed.rdzv_endpoint == endpoint
    assert parse_rendezvous_endpoint(endpoint, 1) == (head, 20015)
    assert parsed.local_addr == head
    assert (parsed.training_script, parsed.training_script_args) == ("widemix", ["train", "r.yaml"])
    assert (parsed.max_restarts, parsed.rdzv_backend, parsed.rdzv_id) == (2, "c10d", "train-12005-0")
    assert (parsed.log_dir, parsed.tee, parsed.local_ranks_filter) == (str(tmp_path / "node-1"), "3", "0")


def test_the_first_node_hosts_the_meeting_at_the_address_by_which_others_reach_it(tmp_path, monkeypatch):
    """Each use has its port and its name, in each start of the job; the doctor is not started again."""
    from torch.distributed.run import parse_args

    routes = []
    monkeypatch.setattr(node_module, "route_from", lambda host: routes.append(host) or f"to {host}")
    monkeypatch.setattr(node_module, "_numeric_address", lambda host: host)
    ports = {"train": 20015, "preflight": 20016, "rendezvous": 20017}
    arguments = Namespace(
        addresses=["10.0.0.1", "10.0.0.2", "10.0.0.3"], ranks=4, restarts=2, logs=tmp_path, ports=ports
    )
    job = {"SLURM_JOB_ID": "9", "SLURM_STEP_NUM_NODES": "3", "SLURM_RESTART_COUNT": "4"}
    for node, use, number, endpoint, host, restarts in (
        ("0", "train", "train-9-4", 20015, "10.0.0.2", 2),
        ("2", "train", "train-9-4", 20015, "10.0.0.1", 2),
        ("1", "preflight", "preflight-9-4", 20016, "10.0.0.1", 0),
    ):
        parsed = parse_args(torchrun_command(arguments, ["widemix"], job | {"SLURM_NODEID": node}, use))
        assert (parsed.rdzv_id, parsed.rdzv_endpoint) == (number, f"10.0.0.1:{endpoint}")
        assert (parsed.rdzv_conf, parsed.local_addr) == (f"is_host={int(node == '0')}", f"to {host}")
        assert (parsed.max_restarts, parsed.nproc_per_node) == (restarts, "4")
    alone = Namespace(**vars(arguments) | {"addresses": ["10.0.0.1"]})
    assert parse_args(torchrun_command(alone, ["x"], job | {"SLURM_NODEID": "0"})).local_addr == "to 10.0.0.1"
    monkeypatch.setattr(node_module, "route_from", lambda host: None)
    with pytest.raises(InputError, match=r"^node 1: no route to 10\.0\.0\.1$"):
        torchrun_command(arguments, ["x"], job | {"SLURM_NODEID": "1"})


def test_a_name_that_does_not_resolve_yet_is_asked_for_again(monkeypatch):
    waits, answers = [], [OSError(2, "not known")] * 3 + [[(0, 0, 0, "", ("10.0.0.1", 0)), (0, 0, 0, "", ("::1", 0))]]

    def getaddrinfo(host, port, type):
        assert (host, port) == ("n1", None)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(node_module.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(node_module, "time", Namespace(sleep=waits.append))
    assert node_module._numeric_address("n1") == "10.0.0.1"
    assert waits == [1, 3, 9]
    answers.extend([OSError(2, "not known")] * 4)
    with pytest.raises(InputError, match=r"^n1: this node cannot resolve the first node's address \(not known\)$"):
        node_module._numeric_address("n1")


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Runs this node's part of a job: node(changes...) -> how it ended, and what it did in what order."""
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.delenv(node_module.LOCAL_VARIABLE, raising=False)

    def run(faulty: bool = False, **changes) -> tuple[Exit, list]:
        done: list = []

        class Handing:
            def __enter__(self):
                done.append("hands on")
                return "relay"

            def __exit__(self, *_):
                done.append("hands on no more")

        known = {
            "note_part": lambda part: done.append(f"noted {part}"),
            "check_torch": lambda: done.append("torch"),
            "_use_local_python": lambda *given: done.append(("python", *given)),
            "_relay": lambda given, environ: Handing(),
            "data_for": lambda *given: done.append(("staged", *given)) or Path("/disk/copy"),
            "wait_for_all_nodes": lambda given, environ: done.append("all are here"),
            "_preflight": lambda given, data: done.append(("preflight", data)) or ["n3"],
            "_can_exclude": lambda names, environ: names == ["n3"] and faulty,
            "torchrun_command": lambda given, program, environ, attempt=(): ["torchrun", *program, *attempt],
            "_open_store": lambda given, environ: done.append("store") or "store",
            "Meeting": lambda *given: done.append(("meeting", *given)) or "meeting",
            "train_elastic": lambda meeting, node, train, restarts: (
                done.append((meeting, node, restarts)) or [train(number, size) for number, size in ((0, 2), (1, 1))]
            ),
            "run_torchrun": lambda command: done.append(command),
        }
        for name, function in known.items():
            monkeypatch.setattr(node_module, name, function)
        own = {"sizes": [], "stage": "/disk", "environment": "", "preflight": "no", "logs": tmp_path / "logs"}
        return _start(Namespace(**own | changes), ["r.yaml"]), done

    return run


def test_a_node_stages_waits_for_all_and_trains_on_its_own_data(node, tmp_path):
    """It hands on blocks until all have theirs, and notes how long each part took."""
    code, done = node()
    train = ["torchrun", "widemix", "train", "r.yaml", "--data.path=/disk/copy"]
    begun = ["noted batch script", "torch", "hands on", ("staged", ["r.yaml"], "/disk", "relay"), "noted staging"]
    met = ["all are here", "hands on no more", "noted waiting for nodes"]
    assert (code, done) == (Exit.DONE, [*begun, *met, train])
    assert json.loads((tmp_path / "logs/node-1.json").read_text()) == train
    assert (tmp_path / "logs/node-1.started").exists()


def test_a_node_of_an_elastic_job_hands_on_blocks_while_it_trains(node, monkeypatch, tmp_path):
    """To nodes that are late; the store is open before, as one that is late could be taken for one that failed."""
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "3")
    code, done = node(sizes=[2, 1], restarts=5)
    begun = ["noted batch script", "torch", "store", "hands on", ("staged", ["r.yaml"], "/disk", "relay")]
    met = ["noted staging", ("meeting", "store", 1, 3, [2, 1]), ("meeting", 1, 5), "noted waiting for nodes"]
    train = ["torchrun", "widemix", "train", "r.yaml", "--data.path=/disk/copy"]
    assert (code, done) == (Exit.DONE, [*begun, *met, [*train, 0, 2], [*train, 1, 1], "hands on no more"])
    assert json.loads((tmp_path / "logs/node-1.json").read_text()) == [*train, 1, 1]


def test_a_node_changes_to_its_environment_once(node, monkeypatch):
    _, done = node(environment="e.tar")
    assert done[:3] == ["noted batch script", ("python", "e.tar", "/disk"), "torch"]
    monkeypatch.setenv(node_module.LOCAL_VARIABLE, "e")
    _, done = node(environment="e.tar")
    assert done[:2] == ["torch", "hands on"]


@pytest.mark.parametrize("preflight", ["report", "exclude"])
def test_a_node_trains_after_the_preflight_unless_the_job_can_do_without_it(node, preflight, tmp_path):
    code, done = node(preflight=preflight)
    assert code == Exit.DONE
    assert done[-3:-1] == [("preflight", Path("/disk/copy")), "noted preflight"]
    (tmp_path / "logs/node-1.json").unlink()
    code, done = node(preflight=preflight, faulty=True)
    assert (code, done[-1]) == (Exit.FAILED, ("preflight", Path("/disk/copy")))
    assert not (tmp_path / "logs/node-1.json").exists()


def test_ranks_train_on_the_data_of_their_node_whatever_is_in_its_path():
    """Of /data/set #2 they were told /data/set, the rest being a comment to YAML, and trained on that."""
    _, overrides = split_overrides(train_program(["recipe.yaml"], Path("/data/set #2: 'a'")))
    assert load_recipe(RECIPE, overrides).data.path == "/data/set #2: 'a'"


def test_nodes_of_an_elastic_job_meet_in_its_store_and_torchrun_starts_no_rank_again(tmp_path):
    from torch.distributed.run import parse_args

    ports = {"train": 20015, "rendezvous": 20016}
    arguments = Namespace(addresses=["127.0.0.1"], ranks=4, restarts=2, logs=tmp_path, ports=ports)
    environ = {"SLURM_NODEID": "0", "SLURM_JOB_ID": "12005", "SLURM_STEP_NUM_NODES": "3"}
    parsed = parse_args(torchrun_command(arguments, ["widemix"], environ, attempt=(1, 2)))
    assert (parsed.nnodes, parsed.max_restarts, parsed.rdzv_endpoint) == ("2", 0, "127.0.0.1:20016")
    assert (parsed.rdzv_id, parsed.rdzv_conf) == ("train-12005-0-1", "is_host=0,join_timeout=120")
