"""Jobs on a real Slurm: submitted, preempted, with a failing node, and studies with a failed run."""

import re
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import SMALL, Command, train_lines
from tests.end_to_end.test_train import EPOCHS, LAST, assert_same_curve
from tests.launch.slurm import Slurm, job_of, log_of, missing, summaries

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(missing()), reason=missing())]
RECIPE = "recipes/digits/rp_mixer.yaml"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    cluster = Slurm(tmp_path_factory.mktemp("slurm"), nodes=8)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def undisturbed(digits, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    code, output = Command("train", RECIPE, "--data.path", digits, "--run-dir", run, *SMALL, *EPOCHS).wait(900)
    assert code == 0, output
    return run


@pytest.fixture
def submit(slurm, digits):
    """widemix submit of the digits over some nodes, a rank each: submit(folder, options...) -> what it printed."""

    def start(folder: Path, *options: str, code: int = 0) -> str:
        small = (*SMALL, *EPOCHS, "--train.save_every_steps", "5", "--data.path", str(digits))
        machine = ("--gpus-per-node", "0", "--cpus-per-node", "1")
        command = Command("submit", RECIPE, "--run-dir", folder, *small, *machine, *options, env=slurm.environ)
        found, output = command.wait()
        assert found == code, output
        return output

    return start


def wait_for_step(slurm: Slurm, run: Path, step: int) -> None:
    slurm.until(lambda: any(line["step"] >= step for line in train_lines(run)), 600)


def test_two_nodes_run_what_the_dry_run_said(slurm, submit, undisturbed, tmp_path):
    run, staged = tmp_path / "a run", tmp_path / "disk"
    options = (
        "--nodes",
        "2",
        "--stage-to",
        "$STAGED/$SLURMD_NODENAME",
        "--sbatch=--export=ALL,STAGED=" + str(staged),
    )
    dry = submit(run, *options, "--dry-run")
    assert not run.exists()
    output = submit(run, *options)
    job = job_of(output)
    assert output.splitlines()[0] == dry.splitlines()[0]
    spooled = slurm("scontrol", "write", "batch_script", job, "-", check=True)
    assert spooled.rstrip("\0\n") == dry[dry.index("#!/bin/bash") :].rstrip()
    assert slurm.ended(job) == "COMPLETED", log_of(run)
    assert_same_curve(run, undisturbed, 1e-4)
    assert {path.name for path in staged.iterdir()} == {"n0", "n1"}
    summary = summaries(run)[-1]
    assert summary["why"] == ["done"]
    assert summary["hosts"] == ["n0", "n1"]
    assert f"top-1 {summary['top1']:.2f} %" in log_of(run)
    parts = ["queue", "batch script", "staging", "waiting for nodes", "ranks", "imports", "rendezvous"]
    parts += ["data and run folder", "network and checkpoint", "first batch", "first step"]
    assert list(summary["first_step"]) == parts
    assert 0 < sum(summary["first_step"].values()) < 60 * summary["minutes"] + summary["first_step"]["queue"]
    assert "s: queue " in log_of(run)
    logs = sorted(run.glob("slurm/*/node-*/*/attempt_0/*/stderr.log"))
    assert len(logs) == 2
    assert sum("done, top-1" in log.read_text() for log in logs) == 1  # rank 0's


def test_a_signal_before_any_rank_started_requeues_the_job(slurm, submit, tmp_path):
    """Modules, or a cold Python, may take until the time limit's notice, which once ended the job without a word."""
    run = tmp_path / "run"
    job = job_of(submit(run, "--nodes", "1", "--setup", "echo loading; sleep 5"))
    slurm.until(lambda: "loading" in log_of(run), 300)
    slurm("scancel", "--batch", "--signal=USR1", job, check=True)
    slurm.start_again(job, 1)
    assert slurm.ended(job) == "COMPLETED", log_of(run)
    first, last = summaries(run)
    assert first["why"] == ["stopped by a signal, before any rank started"]
    assert first["minutes"] >= 0.08
    assert last["why"] == ["done"]


def test_a_cancelled_job_saves_and_is_not_requeued(slurm, submit, tmp_path):
    run = tmp_path / "run"
    job = job_of(submit(run, "--nodes", "1"))
    wait_for_step(slurm, run, 12)
    slurm("scancel", job, check=True)
    slurm.until(lambda: not slurm("squeue", "-h"), 300)
    assert slurm.job(job, "JobState") == "CANCELLED", log_of(run)
    assert slurm.job(job, "Restarts") == "0"
    assert not (run / "done.json").exists()
    assert max(int(mark.parent.name) for mark in run.glob("checkpoints/*/COMPLETE")) > 10


def test_a_killed_rank_is_started_again_within_the_job(slurm, submit, undisturbed, tmp_path):
    run = tmp_path / "run"
    job = job_of(submit(run, "--nodes", "2"))
    wait_for_step(slurm, run, 12)
    kill_rank(run, 1)
    assert slurm.ended(job) == "COMPLETED", log_of(run)
    assert slurm.job(job, "Restarts") == "0"
    # To the other node's torchrun this is an attempt too, or a change of members, whichever it learns of first.
    assert list(run.glob("slurm/*/node-*/*/attempt_1"))
    assert re.search(rf"at step \d+ to {LAST} steps on 2 ranks", log_of(run))
    assert_same_curve(run, undisturbed, 1e-4)


def kill_rank(run: Path, rank: int) -> None:
    for process in psutil.process_iter():
        try:
            environ = process.environ()
        except psutil.Error:
            continue
        if environ.get("RANK") == str(rank) and environ.get("WIDEMIX_RANK_STATUS_DIR", "").startswith(str(run)):
            process.send_signal(signal.SIGKILL)


def names_of(output: str) -> list[str]:
    """The run folders of the runs, from the table that a dry run prints."""
    return [line.partition("\t")[0] for line in output.splitlines() if "\t" in line and "--train.seed=" in line]


def test_a_study_resubmits_the_cell_that_failed_and_no_other(slurm, submit, tmp_path):
    folder = tmp_path / "study"
    study = ("--vary", "train.seed=0,1,2", "--train.epochs", "2")
    names = names_of(submit(folder, *study, "--dry-run"))
    (folder / names[1]).mkdir(parents=True)
    (folder / names[1] / "thesis.tex").write_text("not a run")
    output = submit(folder, *study)
    job = job_of(output)
    assert "3 runs" in output
    assert "are queued or running" in submit(folder, *study, code=2)  # all are queued or running
    slurm.until(lambda: not slurm("squeue", "-h"), 600)
    assert [(folder / name / "done.json").exists() for name in names] == [True, False, True]
    (failed,) = summaries(folder / names[1])
    assert failed["code"] == 2
    assert "is not empty and not a run folder" in failed["why"][0]
    shutil.rmtree(folder / names[1])
    output = submit(folder, *study)
    assert "--array 2 " in output
    assert job_of(output) != job
    slurm.until(lambda: not slurm("squeue", "-h"), 600)
    assert (folder / names[1] / "done.json").exists()
    assert "the others done" in submit(folder, *study, code=2)


def test_a_signal_requeues_its_cell_and_no_other(slurm, submit, tmp_path):
    """One run of an array has the array's own number, by which scontrol means them all."""
    folder = tmp_path / "study"
    array = job_of(submit(folder, "--vary", "train.seed=0,1"))
    slurm.until(lambda: len([run for run in folder.glob("digits-*") if train_lines(run)]) == 2, 600)
    study_runs = dict(line.split() for line in slurm("squeue", "-h", "-o", "%A %F_%K").splitlines())
    study_run = study_runs.pop(array)
    (other,) = study_runs.values()
    slurm("scancel", "--batch", "--signal=USR1", study_run, check=True)
    slurm.start_again(study_run, 1)
    assert [slurm.ended(job) for job in (study_run, other)] == ["COMPLETED", "COMPLETED"]
    assert [slurm.job(job, "Restarts") for job in (study_run, other)] == ["1", "0"]
    assert sorted(len(summaries(run)) for run in folder.glob("digits-*")) == [1, 2]
    assert "invalid date" not in "".join(path.read_text() for path in folder.glob("slurm/*.log"))


def test_a_dead_node_costs_only_its_unsaved_steps(slurm, submit, undisturbed, tmp_path):
    run = tmp_path / "run"
    slurm("scontrol", "update", "NodeName=n0", "State=DRAIN", "Reason=test", check=True)
    job = job_of(submit(run, "--nodes", "2"))
    wait_for_step(slurm, run, 20)
    assert slurm.job(job, "NodeList") == "n[1-2]"
    slurm.kill_node("n2")
    slurm.until_down("n2")
    slurm.start_again(job, 1)
    assert not {"n0", "n2"} & set(slurm("scontrol", "show", "hostnames", slurm.job(job, "NodeList")).split())
    assert slurm.ended(job) == "COMPLETED", log_of(run)
    assert re.search(r"Slurm has lost n2; this start saved \d+ steps", log_of(run))
    assert f"job {job} is requeued by Slurm" in log_of(run)
    assert_same_curve(run, undisturbed, 1e-4)


def test_a_node_that_dies_while_it_stages_costs_one_start(slurm, submit, undisturbed, tmp_path):
    """It once ended the job: nothing was saved in that start."""
    run, staged = tmp_path / "run", tmp_path / "disk"
    job = job_of(submit(run, "--nodes", "2", "--stage-to", f"{staged}/$SLURMD_NODENAME"))
    slurm.until(lambda: len([*staged.glob("n*")]) == 2, 600)
    lost = max(path.name for path in staged.iterdir())
    slurm.kill_node(lost)
    slurm.start_again(job, 1)
    slurm.start_node(lost)
    assert slurm.ended(job) == "COMPLETED", log_of(run)
    assert f"Slurm has lost {lost}; this start saved nothing: requeued once" in log_of(run)
    assert f"job {job} is requeued by Slurm" in log_of(run)
    assert_same_curve(run, undisturbed, 1e-4)


def test_an_elastic_job_goes_on_without_a_node_that_fails(slurm, submit, undisturbed, tmp_path):
    run = tmp_path / "run"
    job = job_of(submit(run, "--nodes", "4", "--elastic", "2"))
    wait_for_step(slurm, run, 12)
    killed = slurm("scontrol", "show", "hostnames", slurm.job(job, "NodeList")).split()[3]
    slurm.kill_node(killed)
    assert slurm.ended(job) == "COMPLETED", log_of(run)
    assert slurm.job(job, "Restarts") == "0"
    assert "3 of 4 nodes are left; 2 of them train" in log_of(run)  # the batch of 64 does not divide by 3
    assert re.search(rf"at step \d+ to {LAST} steps on 2 ranks", log_of(run))
    assert [summary["why"] for summary in summaries(run)] == [["done"]]
    assert_same_curve(run, undisturbed, 1e-4)


@pytest.fixture
def make_faulty(slurm):
    """Makes a node faulty for a test: make_faulty("n4")."""
    files = []

    def touch(node: str) -> None:
        files.append(slurm.folder / f"faulty-{node}")
        files[-1].touch()

    yield touch
    for path in files:
        path.unlink()


def test_the_preflight_excludes_a_faulty_node(slurm, submit, undisturbed, tmp_path, make_faulty):
    run = tmp_path / "run"
    make_faulty("n4")  # Slurm takes neighbours: any four of n1 to n7 have n4 among them
    job = job_of(submit(run, "--nodes", "4", "--preflight", "exclude", "--exclude", "n0"))
    slurm.until(lambda: summaries(run), 600)
    assert slurm.ended(job) == "COMPLETED", log_of(run)
    *earlier, last = summaries(run)
    excluded = [
        re.fullmatch("the preflight found faulty nodes, which are excluded: (.*)", start["why"][0])[1]
        for start in earlier
    ]
    assert "n4" in ", ".join(excluded).split(", ")  # a busy machine may name others too
    assert last["why"] == ["done"]
    assert "n4" not in last["hosts"]
    assert {"n0", "n4"} <= set(slurm("scontrol", "show", "hostnames", slurm.job(job, "ExcNodeList")).split())
    assert_same_curve(run, undisturbed, 1e-4)


def test_a_faulty_node_is_kept_if_there_is_no_other(slurm, submit, undisturbed, tmp_path, make_faulty):
    run = tmp_path / "run"
    kept = slurm("sinfo", "-h", "-N", "-p", "usual", "-t", "idle", "-o", "%N").split()[-4:]  # others may have died
    others = sorted({*slurm.nodes} - {*kept})
    make_faulty(kept[1])
    job = job_of(submit(run, "--nodes", "4", "--preflight", "exclude", "--exclude", ",".join(others)))
    slurm.until(lambda: train_lines(run), 600)
    slurm("scancel", "--batch", "--signal=USR1", job)
    assert slurm.ended(job) == "COMPLETED", log_of(run)
    assert len(summaries(run)) == 2
    assert f"{kept[1]}: faulty, but kept: the partition has too few other nodes" in log_of(run)
    assert set(summaries(run)[-1]["hosts"]) == {*kept}
    assert slurm("scontrol", "show", "hostnames", slurm.job(job, "ExcNodeList")).split() == others
    assert_same_curve(run, undisturbed, 1e-4)


def test_rank_0_is_on_the_users_first_node(slurm, tmp_path):
    (tmp_path / "hosts").write_text("# of mine\nn2*2\nn0\nn1\n")
    show = "from widemix.distributed.launchers import *; export_torchrun_env()"
    show += "; print(*map(os.environ.get, ('RANK', 'MASTER_ADDR')))"
    listed = f"--export=ALL,SLURM_HOSTFILE={tmp_path}/hosts"
    tasks = ("--nodes=3", "--ntasks=4", "--distribution=arbitrary")
    found = slurm(
        "env", f"SLURM_HOSTFILE={tmp_path}/hosts", "srun", *tasks, listed, sys.executable, "-c", show, check=True
    )
    assert sorted(found.splitlines()) == [f"{rank} n2" for rank in range(4)]


def test_srun_alone_starts_the_ranks(slurm, digits, undisturbed, tmp_path):
    run = tmp_path / "run"
    small = ("--data.path", str(digits), *SMALL, *EPOCHS)
    tasks = ("--nodes=2", "--ntasks-per-node=2", f"--output={tmp_path}/log", "--export=ALL,MASTER_ADDR=127.0.0.1")
    train = (sys.executable, "-m", "widemix", "train", RECIPE, "--run-dir", str(run), *small)
    slurm("srun", *tasks, *train, check=True)
    assert "steps on 4 ranks" in (tmp_path / "log").read_text()
    assert_same_curve(run, undisturbed, 1e-4)
    doctor = (sys.executable, "-m", "widemix", "doctor", "--cluster", "--data", str(digits))
    slurm("srun", *tasks, *doctor)  # its exit code is 1 where the test's machine is busy
    assert "ranks that answered: 4, on nodes: 2" in (tmp_path / "log").read_text()
