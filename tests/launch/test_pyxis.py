"""What srun gets with --container-image. Jobs of a real Pyxis were run by hand: launch/README.md."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from widemix.cli.submit import submit_runs
from widemix.command_line.arguments import Parser
from widemix.command_line.commands import run_command
from widemix.launch.slurm import options

SRUN = """#!{python}
import json, os, sys
if "--help" in sys.argv:
    sys.exit(print("{options}"))
with open("{folder}/calls", "a") as file:
    print(json.dumps([sys.argv[1:], dict(os.environ)]), file=file)
if "widemix.launch.local" in sys.argv:
    print("20000,20001,20002")
sys.exit(2 if "widemix.launch.slurm.finish" in sys.argv else 0)
"""
SCONTROL = """#!/bin/sh
case "$*" in
    *hostnames*) printf 'n0\\nn1\\n' ;;
    *" node "*) echo "NodeName=x NodeAddr=10.0.0.1 Port=1" ;;
    *) echo "JobId=7 JobState=RUNNING SubmitTime=2026-01-01T00:00:00 ExcNodeList=(null)" ;;
esac
"""
PYXIS = "--container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH"


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Puts commands in the place of Slurm's: commands(sbatch=TEXT, ...)."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "sh", "sed", "date", "mkdir", "touch", "paste", "od", "tr", "grep"):
        (folder / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(folder))

    def put(**texts: str) -> None:
        for name, text in texts.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    return put


def srun(folder: Path, options: str = PYXIS) -> str:
    """An srun that writes what it is called with to calls, a line each."""
    return SRUN.format(python=sys.executable, folder=folder, options=options)


@pytest.fixture
def submit(digits, tmp_path, capsys):
    """widemix submit: submit(options...) -> exit code and output."""

    def run(*given: str) -> tuple[int, str]:
        parser = Parser()
        options.add_arguments(parser)
        words = [str(ROOT / "recipes/digits/mixer.yaml"), "--data.path", str(digits), "--gpus-per-node", "0"]
        words += ["--run-dir", str(tmp_path / "the 'run'")]
        code = run_command(parser, submit_runs, [*words, *given])
        return code, "".join(capsys.readouterr())

    return run


def run_script(submitted: str) -> subprocess.CompletedProcess:
    """Run the batch script as Slurm does on the first of two nodes."""
    words = shlex.split(submitted)
    words = words[words.index(str(options.SCRIPT)) :]
    names = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]", "SLURMD_NODENAME": "n0", "SLURM_CPUS_ON_NODE": "2"}
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | names
    return subprocess.run(["bash", *words], env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("image", ["nvcr.io#nvidia/pytorch:25.01-py3", "an image, new.sqsh"])
def test_all_that_runs_python_is_a_step_in_the_container(commands, submit, digits, tmp_path, monkeypatch, image):
    commands(srun=srun(tmp_path), scontrol=SCONTROL)
    place = tmp_path / "the $place"
    place.mkdir()
    monkeypatch.chdir(place)
    Path("an image, new.sqsh").touch()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("SCRATCH", str(scratch))
    code, output = submit("--nodes", "2", "--container-image", image, "--stage-to", "$SCRATCH/data", "--dry-run")
    assert code == 0, output
    done = run_script(output.splitlines()[0])
    assert done.returncode == 2, done.stdout + done.stderr  # that of finish
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    parts = [words[words.index("python3") :] for words, _ in calls]
    assert [words[2] for words in parts] == [
        "widemix.launch.local",
        "widemix.launch.slurm.node",
        "widemix.launch.slurm.finish",
    ]
    assert parts[1][parts[1].index("--ports") + 1] == "20000,20001,20002"
    folders = {str(place), str(tmp_path), str(digits.resolve()), str(ROOT / "recipes/digits"), str(scratch)}
    for words, environ in calls:
        options = dict(word.partition("=")[::2] for word in words[: words.index("python3")])
        assert {*options["--container-mounts"].split(",")} == {f"{folder}:{folder}" for folder in folders}
        assert options["--container-image"] == (str(place / image) if image.endswith(".sqsh") else image)
        assert options["--container-workdir"] == str(place)
        assert "--no-container-mount-home" in options
        assert options["--export"] == "ALL"
        assert Path(environ["WIDEMIX_RANK_STATUS_DIR"]).parent == tmp_path / "the 'run'/slurm"
        # Where a node that died had left the step's container, Enroot said "File already exists", at each start.
        assert environ["ENROOT_FORCE_OVERRIDE"] == "y"
        assert environ["PYTHONSAFEPATH"] == "1"  # the working folder's modules are not imported
    alone = {"--overlap", "--nodes=1", "--ntasks=1", "--nodelist=n0"}
    assert [alone <= {*words} for words, _ in calls] == [True, False, True]


def test_an_srun_without_pyxis_ends_the_job_before_anything_runs(commands, submit, tmp_path):
    commands(srun=srun(tmp_path, "--container=OCI"), scontrol=SCONTROL)
    _, output = submit("--nodes", "2", "--container-image", "ubuntu", "--dry-run")
    done = run_script(output.splitlines()[0])
    assert done.returncode == 2
    assert done.stdout == "n0: srun has no --container-image, which Pyxis adds\n"
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(("options", "refused"), [("--container=OCI", True), (PYXIS, False), (None, False)])
def test_an_srun_without_pyxis_is_told_at_submission(commands, submit, tmp_path, options, refused):
    recorded = f'#!/bin/sh\necho "$@" >> {tmp_path}/submitted\necho 7\n'
    commands(sbatch=recorded, squeue="#!/bin/sh\necho Priority\n")
    if options:
        commands(srun=srun(tmp_path, options))
    code, output = submit("--container-image", "ubuntu")
    assert code == (2 if refused else 0), output
    assert (tmp_path / "submitted").exists() is not refused
    if refused:
        assert re.fullmatch(r"error: --container-image: srun has no such option here.*\n", output)


def test_a_folder_that_no_container_could_mount_is_refused(submit, tmp_path):
    for option, image in (("--container-image", "ubuntu"), ("--container", str(tmp_path / "image.sif"))):
        (tmp_path / "image.sif").touch()
        code, output = submit(option, image, "--stage-to", "/disk/a:b", "--dry-run")
        assert code == 2
        assert output == "error: /disk/a:b: has a comma or colon, so a container can't mount it; use a path without\n"
    assert submit("--stage-to", "/disk/a:b", "--dry-run")[0] == 0
