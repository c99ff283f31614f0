"""`python -m tests.stress.nights DATA FOLDER [--minutes N] [--seed N]`: jobs on a Slurm that is disturbed at random.

Four nodes, each with a network of its own, and a disk for the runs. In each round a job of two nodes, or of all four
that may lose two, is disturbed up to four times: a rank or a node is killed, a node drained or cut off, the disk
filled; the job is told to stop as at its time limit, makes place for a more urgent one, or is cancelled and submitted
again. In the end it must be complete with the curve of a run which nothing ever disturbed, each step once; or have
ended with a verdict that says why, and then be complete after one more submission. No job may be requeued twice
without a new checkpoint. As root; DATA are the prepared digits. Without --minutes each disturbance comes once.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import psutil

from tests.conftest import ROOT, SMALL, train_lines
from tests.launch.hosts import Hosts
from tests.launch.slurm import Slurm, job_of, log_of, summaries
from tests.stress.chaos import assert_same_steps, parse_arguments
from widemix.errors import Exit

LAST, TOLERANCE = 200, 1e-4
RECIPE = "recipes/digits/rp_mixer.yaml"
OPTIONS = (*SMALL, "--train.epochs", "10", "--train.max_steps", f"{LAST}", "--train.save_every_steps", "10")
OPTIONS += ("--eval.every_epochs", "50", "--train.keep_last", "3")
MACHINE = ("--gpus-per-node", "0", "--cpus-per-node", "1", "--time", "60")
NODES, DISK_MB, TIMEOUT_S = 4, 60, 900


class Night:
    """A cluster, and what happens to the job that runs on it."""

    def __init__(self, data: Path, folder: Path):
        self.data, self.disk = data, folder / "disk"
        self.hosts = Hosts(NODES + 1)
        (folder / "slurm").mkdir()
        self.slurm = Slurm(folder / "slurm", NODES, self.hosts)
        self.disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", self.disk], check=True)
        self.run, self.job = self.disk, ""

    def close(self) -> None:
        self.slurm.stop()
        self.hosts.stop()
        subprocess.run(["umount", "--lazy", self.disk], check=True)

    def submit(self, run: Path, *options: str) -> None:
        """Start a job that trains in this folder."""
        words = ("submit", RECIPE, "--run-dir", str(run), "--data.path", str(self.data), *OPTIONS, *MACHINE, *options)
        said = self.slurm(sys.executable, "-m", "widemix", *words, check=True)
        self.run, self.job = run, job_of(said)

    def state(self) -> str:
        self.slurm.hurry(self.job)
        state = self.slurm.job(self.job, "JobState")
        if state == "PENDING":
            self._release()
        return state

    def _release(self) -> None:
        """Do what launch/README.md tells an operator to do if a lost node comes back with processes of the job."""
        for number in range(NODES):
            if "Reason=Duplicate" in self.slurm("scontrol", "show", "node", f"n{number}"):
                self.slurm("scontrol", "update", f"NodeName=n{number}", "State=RESUME", check=True)
                self.slurm("scontrol", "release", self.job, check=True)

    def step(self) -> int:
        lines = train_lines(self.run) if (self.run / "metrics.jsonl").exists() else []
        return lines[-1]["step"] if lines else 0

    def wait_for_new_steps(self, count: int) -> bool:
        """Wait until the job has taken some steps more; False if it ends first."""
        goal = self.step() + count
        self.slurm.until(lambda: self.step() >= goal or self.over(), TIMEOUT_S)
        return not self.over() and self.step() < LAST - 20

    def over(self) -> bool:
        return self.state() in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")

    def members(self) -> list[str]:
        """The names of the job's nodes, the first with the batch script."""
        return self.slurm("scontrol", "show", "hostnames", self.slurm.job(self.job, "NodeList")).split()

    def kill_rank(self) -> None:
        found = [process for process in psutil.process_iter() if self._is_rank(process)]
        if found:
            random.choice(found).kill()

    def _is_rank(self, process: psutil.Process) -> bool:
        try:
            environ = process.environ()
        except psutil.Error:
            return False
        return "RANK" in environ and environ.get("WIDEMIX_RANK_STATUS_DIR", "").startswith(f"{self.run}/")

    def kill_node(self) -> None:
        name = random.choice(self.members())
        self.slurm.kill_node(name)
        self.slurm.until_down(name)
        self.slurm.start_node(name)

    def cut_off(self) -> None:
        """The node computes, and writes to the common disk, for as long as it does not notice."""
        name = random.choice(self.members())
        self.hosts.cut(int(name[1:]) + 1)
        self.slurm.until_down(name)
        time.sleep(random.choice([0, 10, 30]))
        self.hosts.mend(int(name[1:]) + 1)

    def drain(self) -> None:
        """The job ends its work there, or is requeued elsewhere; then the node comes back."""
        name = random.choice(self.members())
        self.slurm("scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=test", check=True)
        if random.random() < 0.5:
            self.signal()
        goal, end = self.step() + 10, time.monotonic() + 60  # a job of all nodes waits for this one
        self.slurm.until(lambda: self.step() >= goal or self.over() or time.monotonic() > end, TIMEOUT_S)
        self.slurm("scontrol", "update", f"NodeName={name}", "State=RESUME", check=True)

    def signal(self) -> None:
        """What --signal=B:USR1@300 does at the time limit."""
        self.slurm("scancel", "--batch", "--signal=USR1", self.job)

    def preempt(self) -> None:
        wanted = ("--partition=urgent", f"--nodes={NODES}", "--exclusive", "--output=/dev/null", "--wrap=exit")
        urgent = self.slurm("sbatch", "--parsable", *wanted, check=True).strip()
        self.slurm.ended(urgent)

    def fill_disk(self) -> None:
        """Saves fail until there is space again."""
        filler = self.disk / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(b"\0" * 65536):
                    pass
            except OSError:
                pass
        end = time.monotonic() + random.choice([5, 20, 60])  # steps are not known: metrics.jsonl is on this disk
        self.slurm.until(lambda: self.over() or time.monotonic() > end, TIMEOUT_S)
        filler.unlink()

    def cancel(self) -> None:
        self.slurm("scancel", self.job, check=True)


DISTURBANCES = (
    Night.kill_rank,
    Night.kill_node,
    Night.cut_off,
    Night.drain,
    Night.signal,
    Night.preempt,
    Night.fill_disk,
    Night.cancel,
)


def play(night: Night, run: Path, clean: Path, chosen: list[Callable[[Night], None]], *options: str) -> str:
    """A round: what is done, in turns, to a job with these options of `widemix submit`; return what happened."""
    night.submit(run, *options)
    told = [" ".join(("submitted", *options))]
    for disturb in chosen:
        if not night.wait_for_new_steps(random.randint(12, 60)):
            break
        told.append(f"{disturb.__name__} at {night.step()}")
        disturb(night)
    night.slurm.until(night.over, TIMEOUT_S)
    if night.state() != "COMPLETED":
        told.append(_explained(night))
        night.submit(run, *options)
        night.slurm.until(night.over, TIMEOUT_S)
    assert night.state() == "COMPLETED", f"{told}\n{log_of(run)}"
    _check_requeues(run)
    assert_same_steps(run, clean, LAST, TOLERANCE)
    return "; ".join(told)


def _explained(night: Night) -> str:
    """Why a job ended that was not complete: it was cancelled, or its last verdict says it."""
    found = summaries(night.run)
    if night.state() == "CANCELLED":
        return "cancelled, submitted again"
    if not found:  # there was no space for a verdict either
        assert "No space left on device" in log_of(night.run), f"{night.state()}\n{log_of(night.run)}"
        return "ended on a full disk, submitted again"
    last = found[-1]
    assert last["code"] == Exit.FAILED, f"{last}\n{log_of(night.run)}"
    assert re.search("saved nothing", last["why"][-1]), f"{last}\n{log_of(night.run)}"
    return f"ended ({'; '.join(last['why'])}), submitted again"


def _check_requeues(run: Path) -> None:
    in_vain = [summary["code"] == Exit.REQUEUE and summary.get("new_steps") == 0 for summary in summaries(run)]
    assert not any(map(all, pairwise(in_vain))), f"requeued twice without progress\n{log_of(run)}"


def disturbances(minutes: float) -> Iterator[list[Callable[[Night], None]]]:
    """Those of each round: random ones for so many minutes; without minutes each comes once, alone."""
    if not minutes:
        yield from ([disturb] for disturb in DISTURBANCES)
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        yield random.choices(DISTURBANCES, k=random.randint(1, 4))


def main() -> None:
    arguments = parse_arguments(__doc__)
    folder = arguments.folder
    folder.mkdir(parents=True)
    os.chdir(ROOT)
    clean = folder / "clean"
    words = (RECIPE, "--run-dir", str(clean), "--data.path", str(arguments.data), *OPTIONS)
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "widemix", "train", *words], env=environ, check=True)
    night = Night(arguments.data, folder)
    began, number = time.monotonic(), 0
    try:
        for number, chosen in enumerate(disturbances(arguments.minutes), start=1):
            options = random.choice([("--nodes", "2"), ("--nodes", "4"), ("--nodes", "4", "--elastic", "2")])
            run = night.disk / f"round-{number}"
            told = play(night, run, clean, chosen, *options)
            print(f"{(time.monotonic() - began) / 60:.1f} min  round {number}: {told}", flush=True)
            shutil.rmtree(run)  # the disk is small
    finally:
        night.close()
    print(f"{number} rounds, each complete with the undisturbed curve", file=sys.stderr)


if __name__ == "__main__":
    main()
