"""A study is run by processes that are killed and started again, several at once: no run is lost or doubled."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.clone import CLONE
from tests.conftest import SMALL, Fork, System
from tests.studies.conftest import TWO, leave_run
from tests.terminal import Terminal
from widemix.errors import Exit, RunError
from widemix.lease import RENEWAL_S, Leases
from widemix.processes import stop_signals
from widemix.recipe import dump_recipe
from widemix.studies.rows import Table
from widemix.studies.runner import Runner
from widemix.studies.study import read_study, study_runs_of

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
from widemix.cli.arguments import Parser
from widemix.cli.commands import run_command
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
        self.path.write_text(TWO.replace("runs:", f"seeds: {[*range(seeds)]}\nruns:"))
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

    def wait_until_held(self, count: int) -> None:
        (self.folder.parent / "hold-0").touch()
        while self.held() < count:
            time.sleep(0.02)

    def is_left(self) -> bool:
        """Whether no run is busy, and none has a lease."""
        return not list(self.folder.glob("*/busy")) and not list(self.folder.glob("leases/*"))

    def run(self, code: str, runs: int | None = None, **options) -> Exit:
        """Train runs by Python code in this process."""
        return Runner(self.folder, program=(sys.executable, "-S", "-c", code), **options).run(self.study_runs[:runs])


def test_killed_runners_that_start_again_train_each_run_once(tmp_path):
    """Two at once, of which each is killed in the middle of a run."""
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


@pytest.mark.parametrize("end", ["SIGTERM", "terminal", "reader"])
def test_a_stopped_runner_stops_its_runs_with_a_checkpoint(tmp_path, end):
    """Also by a closed ssh; and `widemix study run | tee log`, where Ctrl-C ends tee first."""
    study = Study(tmp_path, seeds=2)
    if end == "terminal":
        terminal = Terminal("-c", RUN, study.path, study.folder, study.path.with_name("trainer.py"), "2")
        study.wait_until_held(2)
        code = terminal.close()
    else:
        with study.start(2) as runner:
            study.wait_until_held(2)
            if end == "reader":
                runner.stdout.close()
            runner.send_signal(signal.SIGINT if end == "reader" else signal.SIGTERM)
            code = runner.wait(600)
    assert code == 75
    assert study.is_left()


def test_a_terminal_has_a_bar_below_the_lines_of_runs(tmp_path):
    study = Study(tmp_path, seeds=1)
    said = Terminal("-c", RUN, study.path, study.folder, study.path.with_name("trainer.py"), "1").read_to_end()
    assert re.findall(r"runs: \d of 2", said)[-1] == "runs: 2 of 2"
    assert re.search(r"runs: 1 of 2, about 0:00:\d\d left", said)
    assert len(re.findall(r"\[2K[\w-]+: started\r\n", said)) == 2  # each in place of the bar, drawn again below


def test_a_runner_stopped_while_starting_starts_no_other(tmp_path, system: System):
    study, start = Study(tmp_path, seeds=2), subprocess.Popen

    def stopped_here(*words, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return start(*words, **options)

    system({"subprocess.Popen": stopped_here})
    assert study.run("import time; time.sleep(600)", at_once=2) == Exit.REQUEUE
    assert len(list((study.folder / "logs").glob("*.log"))) == 1
    assert (study.done(), study.is_left()) == (0, True)


WORLD = """
import os, sys
print(*sorted({'PMI_SIZE', 'SLURM_STEP_NUM_TASKS', 'SLURM_STEP_ID'} & set(os.environ)))
print(*sys.argv[1:])
sys.exit(1)
"""


def test_a_run_of_runners_under_srun_has_its_own_world(tmp_path, monkeypatch):
    study = Study(tmp_path, seeds=1)
    world = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "PMI_SIZE": "4"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError):
        study.run(WORLD, at_once=2, ranks=3)
    for study_run in study.study_runs:
        words = [study_run.path, "--run-dir", study.folder / study_run.name, "--ranks", 3]
        words += [f"--model.channels={study_run.recipe.model.channels}", "--train.seed=0"]
        log = study.folder / f"logs/{study_run.name}.log"
        assert log.read_text() == f"SLURM_STEP_ID\n{' '.join(map(str, words))}\n"


@pytest.mark.parametrize(
    ("at_once", "ranks", "gpus", "cpus", "devices"),
    [
        (1, 1, [], ["[3, 5, 6]"], [""]),
        (2, 1, ["3"], ["[3]", "[5]"], ["3", "3"]),
        (2, 2, ["3"], ["[3]", "[5]"], ["3", "3"]),  # whose ranks share it
        (3, 2, ["0", "1", "GPU-2", "3"], ["[3]", "[5]", "[6]"], ["0,1", "GPU-2,3", "0,1"]),
        (4, 1, ["0", "1"], ["[3]", "[5]", "[6]", "[3]"], ["0", "1", "0", "1"]),
    ],
)
def test_runs_at_once_share_cpus_and_gpus(tmp_path, system: System, at_once, ranks, gpus, cpus, devices):
    study = Study(tmp_path, seeds=2)
    system({
        "os.sched_getaffinity": lambda process: {6, 3, 5},
        "os.sched_setaffinity": lambda process, own: os.write(1, f"{own}\n".encode()),  # in the new process
    })  # fmt: skip
    code = "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES']); sys.exit(1)"
    with pytest.raises(RunError):
        study.run(code, at_once, at_once=at_once, ranks=ranks, gpus=gpus)
    logs = [
        (study.folder / f"logs/{each.name}.log").read_text().split("\n")[:2] for each in study.study_runs[:at_once]
    ]
    assert logs == [list(own) for own in zip(cpus, devices, strict=True)]


DIVERGES = """
import pathlib, shutil, sys
run = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
run.mkdir()
shutil.copy(run.parent.parent / "recipes" / run.name, run / "recipe.yaml")
(run / "metrics.jsonl").write_text('{"event": "diverged"}')
sys.exit("error: the loss is not finite")
"""


def test_a_run_that_diverges_is_a_result(tmp_path, capsys):
    """And one that another process has is left to it."""
    study, ended = Study(tmp_path, seeds=2), []
    *mine, other = study.study_runs
    assert Leases(study.folder).take(other.name)
    assert study.run(DIVERGES, at_once=3, ended=ended.append) == Exit.DONE
    said = capsys.readouterr().out
    for study_run in mine:
        assert f"{study_run.name}: diverged: the loss is not finite\n" in said
        [seconds] = (study.folder / f"logs/{study_run.name}.core_seconds").read_text().split()
        assert 0 <= float(seconds) < 60
    assert {study_run.name for study_run in ended} == {study_run.name for study_run in mine}
    assert len(ended) == len(mine)
    assert f"{study.folder}: 3 of the 4 runs that were left have ended\n" in said
    assert f"{other.name}: is trained by process {os.getpid()} on " in said
    assert [path.name for path in (study.folder / "leases").iterdir()] == [f"{other.name}.1"]


def test_a_run_that_fails_or_dies_stops_no_other(tmp_path):
    """Nor does SIGTERM, as from an administrator: only who has stopped the runner wants its runs to end so."""
    study = Study(tmp_path, seeds=2)
    for study_run, how in zip(study.study_runs, ("", "9", "15"), strict=False):
        (study.folder / study_run.name).mkdir()
        (study.folder / study_run.name / "refuse").write_text(how)
    runner = study.start()
    output, _ = runner.communicate(timeout=600)
    assert runner.returncode == 1
    assert f"3 of 4 runs failed, first {study.study_runs[0].name}: refused" in output
    for study_run, name in zip(study.study_runs[1:], ("SIGKILL", "SIGTERM"), strict=False):
        assert f"{study_run.name}: killed by {name}" in output
    assert study.done() == 1
    for study_run in study.study_runs[:3]:
        (study.folder / study_run.name / "refuse").unlink()
    runner = study.start()
    output, _ = runner.communicate(timeout=600)
    assert runner.returncode == 0, output
    assert study.done() == 4
    logs = study.folder / "logs"
    assert (logs / f"{study.study_runs[0].name}.log").read_text() == "error: refused\n"  # of the first start
    starts = [len((logs / f"{each.name}.core_seconds").read_text().split()) for each in study.study_runs]
    assert starts == [2, 2, 2, 1]
    assert output.count(": done, top-1 50.00 %") == 3


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


def test_a_run_whose_lease_another_process_has_taken_is_ended(tmp_path, system: System):
    """And is no result of this one. By a clock on which a lease is to be renewed each millisecond."""
    study, ended, clock = Study(tmp_path, seeds=1), [], time.monotonic
    system({"time.monotonic": lambda: clock() * 1000 * RENEWAL_S})
    [first, _] = study.study_runs
    taken = f"open({str(study.folder / 'leases' / first.name)!r} + '.2', 'w'); import time; time.sleep(600)"
    with pytest.raises(RunError, match=r"1 of 1 runs failed, first .*: another process has taken it"):
        study.run(taken, 1, ended=ended.append)
    assert ended == []


def test_a_run_that_another_has_ended_meanwhile_is_not_started(tmp_path, system: System):
    """Between the look for it and its lease, which is given back."""
    study, link = Study(tmp_path, seeds=1), os.link
    [first, _] = study.study_runs

    def ended_here(*names):
        leave_run(study.folder / first.name, first.recipe)
        link(*names)

    system({"os.link": ended_here})
    handlers = [signal.getsignal(number) for number in stop_signals()]
    assert study.run("no program", 1) == Exit.DONE
    assert not list(study.folder.glob("leases/*"))
    assert not (study.folder / "logs").exists()
    assert [signal.getsignal(number) for number in stop_signals()] == handlers


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (f"import sys; print('first'); sys.exit('error: {300 * 'x'}y')", 300 * "x"),
        ("import sys; print('a'); print(); sys.exit(3)", "a"),
        ("import sys; print(); sys.exit(3)", "exit code 3"),
        ("import os; print('a', flush=True); os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    ],
)
def test_the_last_line_of_a_failed_run_is_told_once(tmp_path, capsys, code, told):
    study = Study(tmp_path, seeds=1)
    with pytest.raises(RunError, match=rf"1 of 1 runs failed, first {study.study_runs[0].name}: {told} \(see "):
        study.run(code, 1)
    assert "is open again" not in capsys.readouterr().out
    assert study.is_left()


def test_the_time_left_is_that_of_the_runs_so_far(tmp_path, system: System, capsys):
    """Two at once, of 10, 20, 30 and 40 s: 10 s each for three, 15 s for two, 20 s for one."""
    study, clock, seconds = Study(tmp_path, seeds=2), [0.0], iter((10, 20, 30, 40))

    class Process:
        pid = 1 << 30  # none has it

        def __init__(self, command, **_):
            self.ends, self.run = clock[0] + next(seconds), Path(command[command.index("--run-dir") + 1])

        def poll(self):
            if clock[0] < self.ends:
                return None
            [own] = [each for each in study.study_runs if each.name == self.run.name]
            leave_run(self.run, own.recipe)
            return 0

    def sleep(_):
        clock[0] += 1

    system({"subprocess.Popen": Process, "time.sleep": sleep, "time.monotonic": lambda: clock[0]})
    assert study.run("", at_once=2) == Exit.DONE
    left = re.findall(r": done, top-1 50\.00 %(.*)", capsys.readouterr().out)
    assert left == [
        "; 3 runs left, about 0:00:15", "; 2 runs left, about 0:00:15", "; 1 run left, about 0:00:10", "",
    ]  # fmt: skip
