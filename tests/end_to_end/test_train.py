"""The same curve whatever the ranks, the engine, the launcher and the interruptions: real processes, real signals."""

import errno
import json
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import ROOT, SMALL, Command, Fork, train_lines
from tests.faults.faulty import train_with
from tests.forks import Forks, be_widemix, group_of
from tests.shims import preload
from tests.terminal import Terminal
from widemix.run import checkpoint
from widemix.run.listing import summarise
from widemix.run.start_log import read_starts

EPOCHS = ("--train.epochs", "4", "--schedule.warmup_epochs", "1", "--eval.every_epochs", "2")
LAST = 4 * (1437 // 64)
ENDLESS = ("--train.epochs", "10000", *EPOCHS[2:])  # however late the test comes to what it does next
RECORD = ("metrics.jsonl", "done.json", "recipe.yaml", "environment.json")  # of a complete run
# Each step multiplies the weights by minus a million.
STEEP = ("--optim.lr", "1000", "--optim.weight_decay", "1000")


@pytest.fixture(scope="module")
def undisturbed(digits, tmp_path_factory) -> Path:
    """One rank, DDP, from start to end."""
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    arguments = ("train", "recipes/digits/rp_mixer.yaml", "--data.path", digits, "--run-dir", run, *SMALL, *EPOCHS)
    finish(Fork(*arguments, log=run.with_suffix(".log")))
    return run


def assert_same_curve(run: Path, reference: Path, tolerance: float) -> None:
    found, expected = train_lines(run), train_lines(reference)
    assert [line["step"] for line in found] == [line["step"] for line in expected] == list(range(1, LAST + 1))
    for name in ("loss", "grad_norm", "lr"):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance), f"{name} at step {ours['step']}"
    ours, theirs = (json.loads((folder / "done.json").read_text()) for folder in (run, reference))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance)
    assert ours["top1"] == pytest.approx(theirs["top1"], abs=0.3)  # one image of 360


def eval_lines(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == "eval"]


def finish(command: Command) -> None:
    code, output = command.wait()
    assert code == 0, output


def test_two_ranks_have_the_same_curve(train, undisturbed, tmp_path):
    """On other engines: tests/end_to_end/test_worlds.py."""
    finish(train("run", *EPOCHS, "--ranks", "2", real=True))
    assert_same_curve(tmp_path / "run", undisturbed, 1e-4)


@pytest.mark.parametrize(
    ("options", "start"),
    [
        pytest.param(("--ranks", "2"), {}, id="two ranks, then one"),
        pytest.param(("--engine.kind", "deepspeed"), {"world": 2}, id="ZeRO 1 on two ranks, then DDP on one"),
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(train, undisturbed, tmp_path, options, start):
    run = tmp_path / "run"
    held = {"fault": "hold@33:0"}  # within the second epoch
    command = train("run", *EPOCHS, "--train.save_every_steps", "5", *options, **start, **held)
    command.wait_for_step(run, 33)
    command.kill()
    assert not (run / "done.json").exists()
    finish(train("run", *EPOCHS, "--train.save_every_steps", "5"))
    assert_same_curve(run, undisturbed, 1e-4)


def test_a_deterministic_run_has_its_bits_after_a_kill(train, tmp_path):
    options = ("--model.drop_path", "0.4", "--train.deterministic", "true", "--train.max_steps", "20")
    options = (*EPOCHS, *options, "--train.save_every_steps", "4")
    finish(train("whole", *options))
    killed = train("parts", *options, fault="hold@9:0")
    killed.wait_for_step(tmp_path / "parts", 9)
    killed.kill()
    assert not (tmp_path / "parts/done.json").exists()
    finish(train("parts", *options))
    whole, parts = train_lines(tmp_path / "whole"), train_lines(tmp_path / "parts")
    for name in ("step", "loss", "grad_norm", "weight_norm"):
        assert [line[name] for line in parts] == [line[name] for line in whole]
    for name in ("model", "optimizer"):
        one, other = (
            load_file(tmp_path / run / f"checkpoints/00000020/{name}.safetensors") for run in ("whole", "parts")
        )
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("number", "ranks"),
    [pytest.param(signal.SIGTERM, "2", id="SIGTERM"), pytest.param(signal.SIGINT, "1", id="Ctrl-C")],
)
def test_a_signal_saves_at_the_step_and_exits_with_75(train, undisturbed, tmp_path, number, ranks):
    run = tmp_path / "run"
    command = train("run", *EPOCHS, "--ranks", ranks, fault="hold@25:0")
    command.wait_for_step(run, 25)
    command.signal(number)
    code, output = command.wait()
    assert code == 75, output
    assert "stopped with a checkpoint" in output
    last = train_lines(run)[-1]["step"]
    assert (run / f"checkpoints/{last:08d}/COMPLETE").exists()
    assert summarise(run).state == f"stopped, checkpoint {last}"
    assert last < LAST
    finish(train("run", *EPOCHS))
    assert_same_curve(run, undisturbed, 1e-4)
    assert [(line["step"], line["ranks"]) for line in read_starts(run)] == [(1, int(ranks)), (last + 1, 1)]


@pytest.mark.long
def test_ctrl_c_that_ends_the_reader_of_the_output_first(train, tmp_path):
    """As Ctrl-C at `widemix train 2>&1 | tee log` does."""
    run = tmp_path / "run"
    command = train("run", *ENDLESS, real=True)
    command.wait_for_step(run, 5)
    assert command.process.stdout
    command.process.stdout.close()
    command.wait_for_step(run, 25)
    command.signal(signal.SIGINT)
    assert command.process.wait(600) == 75
    last = train_lines(run)[-1]["step"]
    assert (run / f"checkpoints/{last:08d}/COMPLETE").exists()


@pytest.mark.long
def test_a_run_whose_terminal_is_closed_saves(digits, tmp_path):
    """As a closed ssh does it, with a progress bar that nobody sees any more."""
    run = tmp_path / "run"
    words = ("recipes/digits/rp_mixer.yaml", "--data.path", digits, "--run-dir", run, *SMALL, *ENDLESS)
    terminal = Terminal("-m", "widemix", "train", *words)
    while not train_lines(run):
        assert terminal.process.poll() is None
        time.sleep(0.05)
        terminal.read()
    assert terminal.close() == 75
    last = train_lines(run)[-1]["step"]
    assert (run / f"checkpoints/{last:08d}/COMPLETE").exists()


def test_a_run_stopped_at_its_evaluation_leaves_the_same_record(digits, train, undisturbed, tmp_path):
    """The lines of the interval in which it was stopped included."""
    run, log = tmp_path / "run", tmp_path / "log"
    arguments = ("recipes/digits/rp_mixer.yaml", "--data.path", str(digits), "--run-dir", str(run), *SMALL, *EPOCHS)
    codes, output = Forks(train_with, f"stop@{LAST // 2 - 2}", *arguments, "--log.every", "5", log=log).wait()
    assert codes == [75], output
    assert checkpoint.read(run / f"checkpoints/{LAST // 2:08d}").position.evaluation_due
    assert eval_lines(run) == []
    finish(train("run", *EPOCHS, "--log.every", "5"))
    losses = [line["loss"] for line in train_lines(undisturbed)]
    found = {line["step"]: line["loss"] for line in train_lines(run)}
    assert list(found) == [*range(5, LAST, 5), LAST]
    assert all(loss == pytest.approx(fmean(losses[step - 5 : step])) for step, loss in found.items() if step < LAST)
    expected = eval_lines(undisturbed)
    assert [line["step"] for line in eval_lines(run)] == [LAST // 2, LAST]
    assert [line["loss"] for line in eval_lines(run)] == pytest.approx([line["loss"] for line in expected], rel=1e-4)


def test_a_run_stopped_while_steps_fail_claims_no_checkpoint(train, tmp_path):
    run, steep = tmp_path / "run", (*STEEP, "--schedule.warmup_epochs", "0")
    command = train("run", *ENDLESS[:2], *steep, "--faults.max_skipped_steps", "10000000")
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and '"step_skipped"' in metrics.read_text()):
        assert command.is_running(), command.wait()[1]
    command.signal(signal.SIGTERM)
    code, output = command.wait()
    assert code == 75, output
    assert "stopped while steps fail, without a checkpoint of them; start it again to continue" in output
    assert not (run / "checkpoints").exists()


def test_a_complete_run_that_goes_on_is_no_longer_complete(train, tmp_path):
    run = tmp_path / "run"
    finish(train("run", *ENDLESS, "--train.max_steps", "2"))
    assert (run / "done.json").exists()
    command = train("run", *ENDLESS, fault="hold@4:0")
    command.wait_for_step(run, 4)
    assert not (run / "done.json").exists()
    assert f"{run}: was complete after 2 steps; its done.json is removed" in command.forks.said()
    command.kill()


def test_a_loss_that_is_not_finite_stops_the_run(train, tmp_path):
    sparse = ("--train.keep_every_steps", "3")
    code, output = train("run", *EPOCHS, *STEEP, "--optim.name", "sgd", "--optim.clip_grad", "null", *sparse).wait()
    assert code == 1
    assert "warning: train.keep_every_steps 3: a run that saves every 22 steps keeps those of every 66" in output
    assert "error: the loss is nan at step" in output
    assert "lower optim.lr" in output
    assert "Traceback" not in output
    assert not list((tmp_path / "run").glob("checkpoints/*/COMPLETE"))


def train_by_own_clock(folder: Path, *words: str) -> None:
    """The ranks' clocks differ by an hour; runs/ is made in `folder`."""
    os.chdir(folder)
    now = time.localtime(1_000_000_000 + 3600 * int(os.environ["RANK"]))
    time.strftime = partial(lambda strftime, form, at=now: strftime(form, at), time.strftime)
    train_with("none", *words)


def test_ranks_without_a_run_dir_take_rank_0s(digits, tmp_path):
    words = (ROOT / "recipes/digits/mixer.yaml", "--data.path", digits, *SMALL, "--train.max_steps", "2")
    environs = group_of(2)
    codes, output = Forks(
        train_by_own_clock, tmp_path, *map(str, words), log=tmp_path / "log", environs=environs
    ).wait()
    assert codes == [0, 0], output
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.endswith(time.strftime("-%Y%m%d-%H%M%S", time.localtime(1_000_000_000)))
    assert (run / "done.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "torch.distributed.launch", "deepspeed"])
def test_the_fields_launchers_start_it_too(digits, undisturbed, tmp_path, launcher):
    run = tmp_path / "run"
    arguments = ("recipes/digits/rp_mixer.yaml", "--data.path", digits, "--run-dir", run, *SMALL, *EPOCHS)
    if launcher != "deepspeed":
        head = ("--standalone", "--nproc-per-node", "2", "-m", "widemix", "train")
        module = "torch.distributed.run" if launcher == "torchrun" else launcher
        command = Command(*head, *arguments, module=module)
    else:
        head = ("--num_gpus", "2", "--module", "widemix", "train")
        command = Command(*head, *arguments, module="deepspeed.launcher.runner", env={"PYTHONPATH": str(ROOT)})
    finish(command)
    assert_same_curve(run, undisturbed, 1e-4)


def test_the_checkpoint_is_readable_without_us(digits, undisturbed, tmp_path):
    weights = load_file(undisturbed / f"checkpoints/{LAST:08d}/model.safetensors")
    assert "head.weight" in weights
    metrics = tmp_path / "metrics.json"
    code, output = Fork("eval", undisturbed, "--json", metrics, log=tmp_path / "log").wait()
    assert code == 0, output
    found, done = json.loads(metrics.read_text()), json.loads((undisturbed / "done.json").read_text())
    for name in ("loss", "top1", "top5"):
        assert done[name] == pytest.approx(found[name], rel=1e-5)
    assert (found["samples"], found["step"]) == (360, LAST)


def export_slowly(*words: str) -> None:
    """Its disk takes a minute for each file."""
    os.fsync = lambda _: time.sleep(60)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # both are ignored below nohup and in a shell's background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    be_widemix("export", *words)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_an_export_leaves_nothing_of_it(undisturbed, tmp_path, number):
    exporting = Forks(export_slowly, str(undisturbed), "--to", f"{tmp_path}/to/export", log=tmp_path / "log")
    while not list(tmp_path.glob("to/.export.*/*")):
        time.sleep(0.01)
    exporting.signal(number)
    codes, said = exporting.wait()
    assert codes == [1 if number == signal.SIGINT else -number], said
    assert "Traceback" not in said
    assert list((tmp_path / "to").iterdir()) == []


@pytest.fixture
def disk(tmp_path):
    """A disk of a few megabytes."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3000k", "tmpfs", folder], check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


def flush_slowly(*words: str) -> None:
    """Be a rank whose disk takes 13 seconds for one file of a checkpoint."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        if ".writing-2/optimizer" in os.readlink(f"/proc/self/fd/{descriptor}"):
            time.sleep(13)
        fsync(descriptor)

    os.fsync = slow
    train_with("none", *words)


@pytest.mark.long
def test_a_slow_last_save_is_waited_for_by_all_ranks(digits, tmp_path):
    run, ends = tmp_path / "run", ("--train.max_steps", "2", "--faults.hang_timeout_s", "10")
    words = (ROOT / "recipes/digits/mixer.yaml", "--data.path", digits, "--run-dir", run, *SMALL, *ends)
    codes, said = Forks(flush_slowly, *map(str, words), log=tmp_path / "log", environs=group_of(2)).wait()
    assert codes == [0, 0], said
    assert checkpoint.newest(run).position.step == 2
    assert not (run / "stacks").exists()


def ends_with_its_cure(code: int, said: str, run: Path, reason: str, cure: str) -> None:
    assert code == 1, said
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert last.startswith(f"error: {run}/checkpoints/00000003: the checkpoint could not be written"), said
    assert reason in last
    assert last.endswith(
        f"earlier ones are untouched; {cure}, and start the same command again: it goes on from step 2"
    )


FREE = "free some space, or name another with --run-dir"
THREE = (*SMALL, "--train.max_steps", "3", "--train.save_every_steps", "2", "--log.every", "1")


def test_a_disk_that_is_full_at_the_end_is_named(digits, disk, tmp_path):
    run = disk / "run"
    words = ("recipes/digits/rp_mixer.yaml", "--data.path", str(digits), "--run-dir", str(run), *THREE)
    [code], said = Forks(train_with, "saved@2:0,fill@2-99", *words, log=tmp_path / "log").wait()
    ends_with_its_cure(code, said, run, "No space left on device", "free some space")
    [code], said = Forks(train_with, "none", *words, log=tmp_path / "log").wait()
    assert (code, said) == (2, f"error: {run}: cannot be written to (No space left on device); {FREE}\n")
    (disk / "others").unlink()
    codes, said = Forks(train_with, "none", *words, log=tmp_path / "log").wait()
    assert codes == [0], said
    assert "at step 2 to 3 steps" in said
    assert checkpoint.newest(run).position.step == 3


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.EIO, "see what is wrong with its disk (`dmesg` may say)"),
        pytest.param(errno.ESTALE, "mount its disk again", marks=pytest.mark.long),
        pytest.param(
            errno.EPERM, "let this user write there (`ls -ld` and `lsattr -d` say why not)", marks=pytest.mark.long
        ),
    ],
)
def test_a_disk_that_fails_at_the_end_is_named(digits, tmp_path, number, cure):
    run = tmp_path / "run"
    words = ("train", "recipes/digits/rp_mixer.yaml", "--data.path", digits, "--run-dir", run, *THREE)
    failing = {"FAILING": str(run), "FAILS_IF": str(run / "checkpoints/.writing-3"), "ERRNO": str(int(number))}
    code, said = Command(*words, env=failing | preload("failing_disk")).wait()
    ends_with_its_cure(code, said, run, os.strerror(number), cure)
    code, said = Fork(*words, log=tmp_path / "log").wait()
    assert code == 0, said
    assert "at step 2 to 3 steps" in said


def test_a_full_disk_keeps_the_last_checkpoint(train, disk):
    (disk / "others").write_bytes(bytes(2_000_000))  # one checkpoint fits, also if some are skipped
    code, output = train(str(disk / "run"), *EPOCHS).wait()
    assert code == 1
    assert "the checkpoint could not be written" in output
    assert "training continues" in output
    assert "Traceback" not in output
    complete = sorted(path.parent.name for path in disk.glob("run/checkpoints/*/COMPLETE"))
    assert complete
    assert sorted(path.name for path in (disk / "run/checkpoints").iterdir()) == complete


def test_a_disk_that_is_full_for_a_while_costs_nothing(digits, undisturbed, disk, tmp_path):
    run, log = disk / "run", tmp_path / "log"
    arguments = ("recipes/digits/rp_mixer.yaml", "--data.path", str(digits), "--run-dir", str(run), *SMALL, *EPOCHS)
    often = ("--train.save_every_steps", "5", "--log.tensorboard", "true")
    codes, said = Forks(train_with, "fill@22-64", *arguments, *often, log=log).wait()
    assert codes == [0], said
    assert said.count("metrics.jsonl: cannot be written to (No space left on device)") == 1
    assert "Traceback" not in said
    assert_same_curve(run, undisturbed, 1e-4)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = [line for line in lines if line["split"] == "event"]
    assert {line["event"] for line in events} == {"save_failed"}
    assert "No space left on device" in events[0]["reason"]
