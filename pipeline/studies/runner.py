"""Trains the open runs of a study, several at once, each in a process of its own that may die."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from widemix.distributed.launchers import without_launcher
from widemix.errors import Exit, RunError
from widemix.files import open_to_write, refuse_link
from widemix.lease import RENEWAL_S, Leases
from widemix.metrics import main_metric
from widemix.processes import children_cpu_seconds, end_with_parent, leave_closed_terminal, stop_signals
from widemix.progress_line import Display, show_clock
from widemix.studies.rows import add_core_seconds
from widemix.studies.study_run import StudyRun
from widemix.terminal import print

_POLL_S = 0.1
_LOOK_S = 10.0  # between looks for runs that others have given back
_AFTER_STOP = (Exit.REQUEUE, -signal.SIGTERM, 128 + signal.SIGTERM)  # the latter before training has begun


@dataclass
class _Running:
    study_run: StudyRun
    process: subprocess.Popen
    log: IO[str]
    slot: int
    began: float
    renewed: float
    taken_over: bool = False  # by another process, since the lease was renewed too late


class Runner:
    """One process's part of a study: takes runs that nobody has, until none is left.

    folder: of the study. at_once: runs at the same time. ranks: of each run. gpus: those of this machine, by the
    names that CUDA_VISIBLE_DEVICES takes; the runs that run at once share them, and the CPUs. program: what trains a
    run, with the arguments of `widemix train`. ended: called with each run that has ended here, also one that
    has diverged: that is a result too.
    """

    def __init__(
        self,
        folder: Path,
        at_once: int = 1,
        ranks: int = 1,
        gpus: Sequence[str] = (),
        program: Sequence[str] = (sys.executable, "-m", "widemix", "train"),
        ended: Callable[[StudyRun], None] = lambda _: None,
    ):
        self._folder, self._at_once, self._ranks, self._gpus = folder, at_once, ranks, list(gpus)
        self._program, self._ended = program, ended
        self._leases = Leases(folder)
        self._running: list[_Running] = []
        self._failed: dict[str, str] = {}  # why, by run
        self._waiting: list[StudyRun] = []
        self._took: list[float] = []  # seconds of each run that is done
        self._stopped = False
        self._next_look = 0.0  # when to look for open runs again

    def run(self, study_runs: Sequence[StudyRun]) -> Exit:
        """Train all runs that have not ended and that no other process has; raises `RunError` if some have failed.

        Returns REQUEUE after one of `stop_signals`. The runs then get SIGTERM: they save a checkpoint and end.
        """
        before = {number: signal.signal(number, self._stop) for number in stop_signals()}
        self._waiting = list(study_runs)
        display = Display(len(study_runs))
        try:
            while True:
                if not self._stopped and time.monotonic() >= self._next_look:
                    self._fill()
                    self._show(display, len(study_runs))
                if not self._running:
                    break
                time.sleep(_POLL_S)
                self._collect()
        finally:
            display.close()
            for running in self._running:  # only after an error of ours
                running.process.kill()
                running.process.wait()
                self._leases.release(running.study_run.name)
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._conclude(study_runs)

    def _fill(self) -> None:
        """Start runs until `at_once` are running; those that are done or started are taken out of the waiting."""
        for study_run in list(self._waiting):
            if self._stopped or len(self._running) >= self._at_once:
                return
            if not study_run.has_ended(self._folder):
                if not self._leases.take(study_run.name):
                    continue
                if not study_run.has_ended(self._folder):  # by another process, since it was looked at
                    self._start(study_run)
                else:
                    self._leases.release(study_run.name)
            self._waiting.remove(study_run)
        self._next_look = time.monotonic() + _LOOK_S

    def _start(self, study_run: StudyRun) -> None:
        slot = min(set(range(self._at_once)) - {running.slot for running in self._running})
        command = [*self._program, str(study_run.path)]
        command += ["--run-dir", str(self._folder / study_run.name), "--ranks", str(self._ranks)]
        command += [f"--{name}={value}" for name, value in study_run.overrides]
        logs = self._folder / "logs"
        for place in (logs, self._folder / study_run.name):
            refuse_link(place)
        logs.mkdir(exist_ok=True)
        log = open_to_write(logs / f"{study_run.name}.log", "a")
        # Of several runners that srun started, each trains runs of its own.
        environ = without_launcher(os.environ) | self._devices(slot)
        cpus = self._cpus(slot)
        prepare = partial(_prepare, end_with_parent(), cpus)
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True, preexec_fn=prepare
        )
        self._leases.add_process(study_run.name, process.pid)
        self._running.append(_Running(study_run, process, log, slot, time.monotonic(), time.monotonic()))
        if self._stopped:  # perhaps while it was started, when `_stop` did not know it
            process.send_signal(signal.SIGTERM)
        _say(f"{study_run.name}: started")

    def _devices(self, slot: int) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES of a slot: one GPU for each rank; runs share GPUs if there are too few."""
        if not self._gpus:
            return {}
        own = [self._gpus[(slot * self._ranks + rank) % len(self._gpus)] for rank in range(self._ranks)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(own))}

    def _cpus(self, slot: int) -> list[int]:
        """The CPUs of a slot: an equal share of those that this process may use; none where it cannot choose."""
        if not hasattr(os, "sched_getaffinity"):
            return []
        usable = sorted(os.sched_getaffinity(0))
        count = max(1, len(usable) // self._at_once)
        return [usable[(slot * count + number) % len(usable)] for number in range(count)]

    def _collect(self) -> None:
        """Renew the leases, and note the runs that have ended."""
        for running in list(self._running):
            name = running.study_run.name
            if time.monotonic() - running.renewed > RENEWAL_S:
                running.renewed = time.monotonic()
                if not self._leases.renew(name) and not running.taken_over:
                    running.taken_over = True
                    os.killpg(running.process.pid, signal.SIGKILL)
            before = children_cpu_seconds()
            code = running.process.poll()
            if code is None:
                continue
            add_core_seconds(self._folder, running.study_run, children_cpu_seconds() - before)
            self._running.remove(running)
            self._next_look = 0.0
            running.log.close()
            state = "stopped"
            if code == Exit.DONE:
                self._took.append(time.monotonic() - running.began)
                done = running.study_run.result(self._folder)
                state = f"done, {main_metric(done)}{self._left()}" if done else "done"
            if running.taken_over:
                state = self._failed[name] = "another process has taken it, since this one was suspended"
            elif code not in (Exit.DONE, *(_AFTER_STOP if self._stopped else ())):
                state = _last_line(Path(running.log.name), code)
                if running.study_run.has_diverged(self._folder):
                    state = f"diverged: {state}"
                else:
                    self._failed[name] = state
            if not running.taken_over and running.study_run.has_ended(self._folder):
                self._ended(running.study_run)
            self._leases.release(name)
            _say(f"{name}: {state}")

    def _show(self, display: Display, total: int) -> None:
        """Renew the bar; in a log each run that ends has its line."""
        if display.has_bar:
            runs = self._runs_left()
            clock = f", about {self._clock(runs)} left" if self._took and runs else ""
            display.show(total - runs, f"runs: {total - runs} of {total}{clock}", at_once=True)

    def _left(self) -> str:
        runs = self._runs_left()
        return f"; {runs} run{'s' * (runs > 1)} left, about {self._clock(runs)}" if runs else ""

    def _runs_left(self) -> int:
        waiting = [study_run for study_run in self._waiting if not study_run.has_ended(self._folder)]
        return len(waiting) + len(self._running)

    def _clock(self, runs: int) -> str:
        """About how long so many runs take: as those that are done took."""
        return show_clock(sum(self._took) / len(self._took) * runs / self._at_once)

    def _stop(self, _number: int, _frame) -> None:
        leave_closed_terminal()
        self._stopped = True
        for running in self._running:
            running.process.send_signal(signal.SIGTERM)

    def _conclude(self, study_runs: Sequence[StudyRun]) -> Exit:
        open_runs = [study_run for study_run in study_runs if not study_run.has_ended(self._folder)]
        others = [study_run for study_run in open_runs if study_run.name not in self._failed]
        again = "; the same command continues" if self._stopped else ""
        ended = len(study_runs) - len(open_runs)
        _say(f"{self._folder}: {ended} of the {len(study_runs)} runs that were left have ended{again}")
        if self._stopped:
            return Exit.REQUEUE
        for study_run in others:
            holder = self._leases.holder(study_run.name)
            where = f"is trained by process {holder.pid} on {holder.host}" if holder else "is open again"
            _say(f"{study_run.name}: {where}")
        if self._failed:
            name, reason = next(iter(self._failed.items()))
            raise RunError(
                f"{len(self._failed)} of {len(study_runs)} runs failed, first {name}: {reason} "
                f"(see {self._folder}/logs); the same command trains them again"
            )
        return Exit.DONE


def _prepare(end: Callable[[], None], cpus: Sequence[int]) -> None:
    """In the new process: it saves and ends when the runner dies, before its lease expires."""
    end()
    if cpus:
        os.sched_setaffinity(0, cpus)


def _say(text: str) -> None:
    with suppress(OSError):  # nothing reads it any more: the runs are still to end with a checkpoint
        print(text, flush=True)


def _last_line(log: Path, code: int) -> str:
    """The last line that a failed run printed, or its exit code."""
    lines = log.read_text(errors="replace").strip().splitlines()
    ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return lines[-1].removeprefix("error: ")[:300] if lines and code > 0 else ended
