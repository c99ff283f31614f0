"""A study is run by processes that are killed and started again, several at once: no run is lost or doubled."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from tests.clone import CLONE, ROOT
from tests.conftest import SMALL, Fork
from tests.terminal import Terminal
from widemix.errors import Exit, RunError
from widemix.lease import Leases
from widemix.processes import stop_signals
from widemix.recipe import dump_recipe
from widemix.studies import runner as module_of_runner
from widemix.studies.rows import Table
from widemix.studies.runner import Runner
from widemix.studies.study import read_study, study_runs_of
from widemix.studies.study_run import StudyRun

STUDY = """
title: t
source: s
claim: c
seeds: [SEEDS]
runs:
- label: Normal
  recipes: {Digits: ROOT/recipes/digits/s_mixer.yaml}
  axes: {model.channels: [8, 16]}
figure: {x: width}
"""

# Stands for `widemix train`: ten steps that a restart continues; SIGTERM ends it after a moment. While there is a
# file `hold-N` it waits after its fifth step once N runs are done.
TRAINER = """
import os, pathlib, shutil, signal, sys, time
run = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
run.mkdir(exist_ok=True)
if (run / "refuse").exists():
    number = (run / "refuse").read_text()
    os.kill(os.getpid(), int(number)) if number else sys.exit("error: refused")
def stop(*_):
    time.sleep(0.3)
    (run / "busy").unlink(missing_ok=True)
    os._exit(75)
signal.signal(signal.SIGTERM, stop)
try:
    os.close(os.open(run / "busy", os.O_CREAT | os.O_EXCL))
except FileExistsError:
    (run / "COLLISION").touch()
steps = run / "steps"
def held():
    done = len(list(run.parent.glob("*/done.json")))
    return any(done >= int(hold.name[5:]) for hold in run.parent.parent.glob("hold-*"))
for _ in range(10 - (len(steps.read_text()) if steps.exists() else 0)):
    time.sleep(0.03)
    while held() and steps.exists() and len(steps.read_text()) == 5:
        time.sleep(0.01)
    with steps.open("a") as file:
        file.write(".")
shutil.copy(run.parent.parent / "recipes" / run.name, run / "recipe.yaml")
(run / "done.json").write_text('{"top1": 50.0}')
(run / "busy").unlink()
"""
RUN = """
import pathlib, sys
from widemix.command_line.arguments import Parser
from widemix.command_line.commands import run_command
from widemix.studies.runner import Runner
from widemix.studies.study import read_study, study_runs_of
path, folder, trainer, at_once = sys.argv[1:]
runner = Runner(pathlib.Path(folder), int(at_once), program=(sys.executable, "-S", trainer))
runs = study_runs_of(pathlib.Path(path), read_study(pathlib.Path(path)))
sys.exit(run_command(Parser(), lambda _: runner.run(runs), []))
"""


class Study:
    """A study whose runs take a third of a second, and its runners."""

    def __init__(self, folder, seeds: int):
        self.path, self.folder = folder / "study.yaml", folder / "runs"
        self.path.write_text(STUDY.replace("ROOT", str(ROOT)).replace("SEEDS", ", ".join(map(str, range(seeds)))))
        (folder / "trainer.py").write_text(TRAINER)
        self.study_runs = study_runs_of(self.path, read_study(self.path))
        (folder / "recipes").mkdir()
        for study_run in self.study_runs:
            (folder / "recipes" / study_run.name).write_text(dump_recipe(study_run.recipe))
        self.folder.mkdir()

    def start(self, at_once=1):
        words = [sys.executable, "-c", RUN, self.path, self.folder, self.path.with_name("trainer.py"), str(at_once)]
        return subprocess.Popen(words, cwd=CLONE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def done(self) -> int:
        return sum(study_run.has_ended(self.folder) for study_run in self.study_runs)

    def held(self) -> int:
        """How many runs stand in their middle, and their leases name their process."""
        count = 0
        for run in (path.parent for path in self.folder.glob("*/steps") if path.read_text() == 5 * "."):
            with suppress(FileNotFoundError):  # it was passing by
                count += len(json.loads((self.folder / f"leases/{run.name}.1").read_text())["processes"]) == 2
        return count


def test_runners_that_are_killed_in_the_middle_and_started_again_two_at_once_train_each_cell_once(tmp_path):
    study, hold = Study(tmp_path, seeds=10), tmp_path / "hold-2"
    hold.touch()
    first = [study.start(), study.start(2)]
    while study.done() < 2 or study.held() < 3:
        time.sleep(0.02)
        assert all(runner.poll() is None for runner in first)
    for runner in first:
        runner.kill()  # it alone: its runs end because it has
        runner.communicate()
    assert study.done() < len(study.study_runs)
    hold.unlink()
    second = [study.start(2), study.start()]
    outputs = [runner.communicate(timeout=600)[0] for runner in second]
    assert [runner.returncode for runner in second] == [0, 0], outputs
    assert {run.name for run in study.folder.iterdir()} == {study_run.name for study_run in study.study_runs} | {
        "logs"
    }
    for study_run in study.study_runs:
        run = study.folder / study_run.name
        assert sorted(path.name for path in run.iterdir()) == ["done.json", "recipe.yaml", "steps"]
        assert (run / "steps").read_text() == 10 * "."
    assert study.done() == len(study.study_runs)
    leases = Leases(study.folder)  # of a run that was done when its runner was killed one stays, which holds nothing
    assert not any(holder.alive for study_run in study.study_runs if (holder := leases.holder(study_run.name)))


def test_a_stopped_runner_stops_its_cells_with_a_checkpoint(tmp_path):
    study = Study(tmp_path, seeds=2)
    (tmp_path / "hold-0").touch()
    runner = study.start(2)
    while study.held() < 2:
        time.sleep(0.02)
    runner.send_signal(signal.SIGTERM)
    output, _ = runner.communicate(timeout=600)
    assert runner.returncode == 75, output
    assert not list(study.folder.glob("*/busy"))
    assert not list(study.folder.glob("leases/*"))


def test_a_terminal_has_a_bar_of_the_runs_below_their_lines(tmp_path):
    study = Study(tmp_path, seeds=1)
    said = Terminal("-c", RUN, study.path, study.folder, study.path.with_name("trainer.py"), "1").read_to_end()
    assert re.findall(r"runs: \d of 2", said)[-1] == "runs: 2 of 2"
    assert re.search(r"runs: 1 of 2, about 0:00:\d\d left", said)
    assert len(re.findall(r"\[2K[\w-]+: started\r\n", said)) == 2  # each in place of the bar, drawn again below


@pytest.mark.parametrize("closed", ["terminal", "reader"])
def test_a_runner_that_nothing_reads_any_more_stops_its_cells_with_a_checkpoint(tmp_path, closed):
    """A closed ssh; and `widemix study run | tee log`, where Ctrl-C ends tee first."""
    study = Study(tmp_path, seeds=2)
    (tmp_path / "hold-0").touch()
    if closed == "terminal":
        terminal = Terminal("-c", RUN, study.path, study.folder, study.path.with_name("trainer.py"), "2")
    else:
        runner = study.start(2)
    while study.held() < 2:
        time.sleep(0.02)
    if closed == "terminal":
        code = terminal.close()
    else:
        runner.stdout.close()
        runner.send_signal(signal.SIGINT)
        code = runner.wait(600)
    assert code == 75
    assert not list(study.folder.glob("*/busy"))
    assert not list(study.folder.glob("leases/*"))


def test_a_runner_that_is_stopped_while_it_starts_a_cell_stops_that_too_and_starts_no_other(tmp_path, monkeypatch):
    study = Study(tmp_path, seeds=2)
    note = Leases.add_process

    def stopped_here(leases, study_run, pid):
        os.kill(os.getpid(), signal.SIGTERM)
        note(leases, study_run, pid)

    monkeypatch.setattr(Leases, "add_process", stopped_here)
    runner = Runner(study.folder, 2, program=(sys.executable, "-S", "-c", "import time; time.sleep(600)"))
    assert runner.run(study.study_runs) == Exit.REQUEUE
    assert len(list((study.folder / "logs").glob("*.log"))) == 1
    assert study.done() == 0
    assert not list(study.folder.glob("leases/*"))


def test_a_cell_trains_in_a_world_of_its_own_where_srun_started_several_runners(tmp_path, monkeypatch):
    study = Study(tmp_path, seeds=1)
    for name, value in {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "2",
        "PMI_SIZE": "4",
    }.items():
        monkeypatch.setenv(name, value)
    print_world = (
        "import os, sys; print({'PMI_SIZE', 'SLURM_STEP_NUM_TASKS', 'SLURM_STEP_ID'} & set(os.environ)); "
        "print(*sys.argv[1:]); sys.exit(1)"
    )
    runner = Runner(study.folder, 2, 3, program=(sys.executable, "-S", "-c", print_world))
    with pytest.raises(RunError):
        runner.run(study.study_runs)
    for study_run in study.study_runs:
        words = [study_run.path, "--run-dir", study.folder / study_run.name, "--ranks", 3]
        words += [f"--model.channels={study_run.recipe.model.channels}", "--train.seed=0"]
        log = study.folder / f"logs/{study_run.name}.log"
        assert log.read_text() == f"{{'SLURM_STEP_ID'}}\n{' '.join(map(str, words))}\n"


DIVERGES = """
import pathlib, shutil, sys
run = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
run.mkdir()
shutil.copy(run.parent.parent / "recipes" / run.name, run / "recipe.yaml")
(run / "metrics.jsonl").write_text('{"event": "diverged"}')
sys.exit("error: the loss is not finite")
"""


def test_a_run_that_diverges_is_a_result_and_one_that_another_process_has_is_left_to_it(tmp_path, capsys):
    study, ended = Study(tmp_path, seeds=2), []
    *mine, other = study.study_runs
    leases = Leases(study.folder)
    assert leases.take(other.name)
    runner = Runner(study.folder, 3, program=(sys.executable, "-S", "-c", DIVERGES), ended=ended.append)
    assert runner.run(study.study_runs) == Exit.DONE
    said = capsys.readouterr().out
    for study_run in mine:
        assert f"{study_run.name}: diverged: the loss is not finite\n" in said
        [seconds] = (study.folder / f"logs/{study_run.name}.core_seconds").read_text().split()
        assert 0 <= float(seconds) < 60
    assert sorted(study_run.name for study_run in ended) == sorted(study_run.name for study_run in mine)
    assert f"{study.folder}: 3 of the 4 runs that were left have ended\n" in said
    assert f"{other.name}: is trained by process {os.getpid()} on " in said
    assert [path.name for path in (study.folder / "leases").iterdir()] == [f"{other.name}.1"]


def test_a_cell_with_wrong_input_or_one_that_dies_does_not_stop_the_others(tmp_path):
    study = Study(tmp_path, seeds=2)
    for study_run, how in zip(study.study_runs, ("", "9"), strict=False):
        (study.folder / study_run.name).mkdir()
        (study.folder / study_run.name / "refuse").write_text(how)
    runner = study.start()
    output, _ = runner.communicate(timeout=600)
    assert runner.returncode == 1
    assert f"2 of 4 runs failed, first {study.study_runs[0].name}: refused" in output
    assert f"{study.study_runs[1].name}: killed by SIGKILL" in output
    assert study.done() == 2
    for study_run in study.study_runs[:2]:
        (study.folder / study_run.name / "refuse").unlink()
    runner = study.start()
    output, _ = runner.communicate(timeout=600)
    assert runner.returncode == 0, output
    assert study.done() == 4
    logs = study.folder / "logs"
    assert (logs / f"{study.study_runs[0].name}.log").read_text() == "error: refused\n"  # of the first start
    starts = [len((logs / f"{each.name}.core_seconds").read_text().split()) for each in study.study_runs]
    assert starts == [2, 2, 1, 1]
    first, last = (line for line in output.splitlines() if ": done, " in line)
    assert re.search(r": done, top-1 50\.00 %; 1 run left, about 0:0\d:\d\d$", first)
    assert last.endswith(": done, top-1 50.00 %")


def test_a_run_that_is_ended_by_another_is_none_that_was_stopped(tmp_path):
    """SIGTERM, as from an administrator: only who has stopped the runner wants its runs to end so."""
    study = Study(tmp_path, seeds=1)
    (study.folder / study.study_runs[0].name).mkdir()
    (study.folder / study.study_runs[0].name / "refuse").write_text(str(int(signal.SIGTERM)))
    runner = study.start()
    output, _ = runner.communicate(timeout=600)
    assert runner.returncode == 1, output
    assert f"1 of 2 runs failed, first {study.study_runs[0].name}: killed by SIGTERM" in output
    assert study.done() == 1


def test_the_command_trains_a_study(tmp_path, digits):
    """With real training; the first run's folder is not a run's."""
    study = Study(tmp_path, seeds=1)
    words = (*SMALL, "--data.path", str(digits), "--train.max_steps", "1")
    pairs = [(name.removeprefix("--"), value) for name, value in zip(words[::2], words[1::2], strict=True)]
    wrong, other = study_runs_of(study.path, read_study(study.path), pairs)
    (study.folder / wrong.name).mkdir()
    (study.folder / wrong.name / "mine.txt").touch()
    command = ("study", "run", study.path, "--to", study.folder, "--at-once", "2", *words)
    code, output = Fork(*command, log=tmp_path / "log").wait()
    assert code == 1
    assert f"1 of 2 runs failed, first {wrong.name}: {study.folder / wrong.name}: is not empty" in output
    assert other.has_ended(study.folder)
    [row] = Table(study.folder / "study.jsonl").rows.values()
    assert (row.run, row.core_seconds > 0) == (other.name, True)


def test_a_run_whose_lease_another_process_has_taken_is_ended_and_no_result_of_this_one(tmp_path, monkeypatch):
    study, ended = Study(tmp_path, seeds=1), []
    monkeypatch.setattr("widemix.studies.runner.RENEWAL_S", -1)
    monkeypatch.setattr(Leases, "renew", lambda *_: False)
    sleeps = (sys.executable, "-S", "-c", "import time; time.sleep(5)")
    runner = Runner(study.folder, program=sleeps, ended=ended.append)
    with pytest.raises(RunError, match=r"1 of 1 runs failed, first .*: another process has taken it"):
        runner.run(study.study_runs[:1])
    assert ended == []


def test_a_run_that_another_has_ended_meanwhile_is_not_started_and_no_longer_held(tmp_path, monkeypatch):
    study, looked = Study(tmp_path, seeds=1), []
    monkeypatch.setattr(StudyRun, "has_ended", lambda run, folder: bool(looked.append(run.name)) or len(looked) > 1)
    handlers = [signal.getsignal(number) for number in stop_signals()]
    runner = Runner(study.folder, program=("/no/such/program",))
    assert runner.run(study.study_runs[:1]) == Exit.DONE
    assert not list(study.folder.glob("leases/*"))
    assert not (study.folder / "logs").exists()
    assert [signal.getsignal(number) for number in stop_signals()] == handlers


def test_of_a_run_that_fails_the_last_line_is_told_once(tmp_path, capsys):
    study = Study(tmp_path, seeds=1)
    words = f"print('first'); sys.exit('error: {300 * 'x'}y')"
    runner = Runner(study.folder, program=(sys.executable, "-S", "-c", f"import sys; {words}"))
    with pytest.raises(RunError, match=rf"1 of 1 runs failed, first {study.study_runs[0].name}: x{{300}} \(see "):
        runner.run(study.study_runs[:1])
    said = capsys.readouterr().out
    assert "is open again" not in said
    assert not list(study.folder.glob("leases/*"))
    log = tmp_path / "log"
    for text, code, told in (("a\nb\n", 1, "b"), ("\n", 3, "exit code 3"), ("a\n", -9, "killed by SIGKILL")):
        log.write_text(text)
        assert module_of_runner._last_line(log, code) == told


def test_more_runs_at_once_than_cpus_have_one_each(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6})
    for at_once, shares in ((1, [[3, 5, 6]]), (2, [[3], [5]]), (4, [[3], [5], [6], [3]])):
        runner = Runner(tmp_path, at_once)
        assert [runner._cpus(slot) for slot in range(at_once)] == shares
    monkeypatch.delattr(os, "sched_getaffinity")
    assert Runner(tmp_path)._cpus(0) == []
    runner._waiting = Study(tmp_path, seeds=1).study_runs
    runner._took = [8.0]
    assert runner._left() == "; 2 runs left, about 0:00:04"
    runner._waiting = runner._waiting[:1]
    assert runner._left() == "; 1 run left, about 0:00:02"
    runner._waiting = []
    assert runner._left() == ""


def test_the_time_that_is_left_is_that_of_the_runs_so_far_for_so_many_at_once(tmp_path):
    runner = Runner(tmp_path, at_once=2)
    runner._took = [10.0, 20.0]
    assert runner._clock(6) == "0:00:45"


def test_cells_that_run_at_once_share_cpus_and_gpus(tmp_path):
    runner = Runner(tmp_path, at_once=3, ranks=2, gpus=["0", "1", "GPU-2", "3"])
    assert [runner._devices(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["0,1", "GPU-2,3", "0,1"]
    assert Runner(tmp_path)._devices(0) == {}
    assert Runner(tmp_path, ranks=2, gpus=["3"])._devices(0) == {"CUDA_VISIBLE_DEVICES": "3"}  # the ranks share it
    usable = os.sched_getaffinity(0)
    parts = [set(runner._cpus(slot)) for slot in range(3)]
    assert all(part and part <= usable for part in parts)
    if len(usable) >= 3:
        assert sum(map(len, parts)) == len(set.union(*parts))
