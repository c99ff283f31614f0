"""A real Slurm on this machine, from Debian's packages: a controller and a few nodes, each a slurmd of its own.

The nodes share this machine's network, or are hosts with networks of their own (hosts.py), host 0 the controller.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import psutil

from tests.launch.hosts import Hosts

CONF = """
ClusterName=test
SlurmctldHost=localhost({controller})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/prolog
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=15
KillWait=30
SchedulerParameters=sched_interval=1,batch_sched_delay=0,requeue_delay=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=usual Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged")


def missing() -> str:
    """Return why Slurm cannot be started here, or an empty string."""
    absent = [name for name in NEEDED if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "starting a Slurm needs root"


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"


class Slurm:
    """A Slurm cluster; an instance is called to run one of Slurm's commands on it."""

    def __init__(self, folder: Path, nodes: int, hosts: Hosts | None = None):
        port = 10_000 + os.getpid() % 9_000  # below those of the jobs
        self.folder, self.hosts = folder, hosts
        controller = hosts.address(0) if hosts else "127.0.0.1"
        lines = [self._node(i, port + 1 + i) for i in range(nodes)]
        conf = CONF.format(folder=folder, controller=controller, port=port, nodes="\n".join(lines))
        (folder / "slurm.conf").write_text(conf)
        (folder / "state").mkdir()
        self._write_prolog()
        self.environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH, "OMP_NUM_THREADS": "1"}
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = (f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed"))
        munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", *files]
        self.daemons = [self._start(munge), self._start(["slurmctld", "-D", "-c"])]
        self.nodes: dict[str, subprocess.Popen] = {}
        for i in range(nodes):
            self.start_node(f"n{i}")
        self.until(lambda: self("sinfo", "-h", "-N", "-p", "usual", "-t", "idle", "-o", "%N").count("n") == nodes)

    def _write_prolog(self) -> None:
        """On a node for which there is a file faulty-NODE, ranks see another version of timm."""
        (self.folder / "other" / "timm-0.0.dist-info").mkdir(parents=True)
        (self.folder / "other" / "timm-0.0.dist-info" / "METADATA").write_text("Name: timm\nVersion: 0.0\n")
        prolog = self.folder / "prolog"
        other = f'echo "export PYTHONPATH={self.folder}/other:$PYTHONPATH"'
        prolog.write_text(f"#!/bin/sh\n[ ! -e {self.folder}/faulty-$SLURMD_NODENAME ] || {other}\n")
        prolog.chmod(0o755)

    def _node(self, number: int, port: int) -> str:
        host = subprocess.run(["hostname", "-s"], capture_output=True, text=True, check=True).stdout.strip()
        address = self.hosts.address(number + 1) if self.hosts else "127.0.0.1"
        return f"NodeName=n{number} NodeHostName={host} NodeAddr={address} Port={port} CPUs=2 RealMemory=2000"

    def start_node(self, name: str) -> None:
        """Start a node's slurmd, for the first time or after `kill_node`."""
        self.nodes[name] = self._start(["slurmd", "-D", "-N", name], int(name[1:]) + 1)

    def _start(self, command: list[str], host: int = 0) -> subprocess.Popen:
        with (self.folder / f"{command[0]}.out").open("a") as log:
            words = self._on(host, command)
            return subprocess.Popen(words, env=self.environ, stdout=log, stderr=log, start_new_session=True)

    def _on(self, host: int, command: Sequence[str]) -> list[str]:
        return self.hosts.on(host, *command) if self.hosts else list(command)

    def __call__(self, *command: str, check: bool = False) -> str:
        done = subprocess.run(self._on(0, command), env=self.environ, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def until(self, condition, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self("squeue", "-l") + self("sinfo", "-N", "-l")
            time.sleep(0.1)

    def job(self, job: str, field: str) -> str:
        """A field of `scontrol show job`, such as JobState."""
        words = self("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.partition("=")[::2] for word in words).get(field, "")

    def start_again(self, job: str, restarts: int) -> None:
        """Wait until the job is running for this many times more."""

        def running() -> bool:
            self.hurry(job)
            return self.job(job, "JobState") == "RUNNING" and self.job(job, "Restarts") == str(restarts)

        self.until(running, 300)

    def ended(self, job: str, seconds: float = 900) -> str:
        """Wait for the end of a job; its state."""

        def over() -> bool:
            self.hurry(job)
            return self.job(job, "JobState") in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")

        self.until(over, seconds)
        return self.job(job, "JobState")

    def hurry(self, job: str) -> None:
        """A requeued job waits for two minutes by itself. Some seconds it must: nodes refuse what has just ended."""
        waits = self.job(job, "JobState") == "PENDING" and self.job(job, "StartTime")
        if waits and waits != "Unknown" and datetime.fromisoformat(waits) - datetime.now() > timedelta(seconds=10):
            self("scontrol", "update", f"JobId={job}", "StartTime=now+5")

    def kill_node(self, name: str) -> None:
        """Kill all processes of a node at once, as a power cut does; Slurm's first, or they tell how others ended."""
        slurms, others = [], []
        for process in psutil.process_iter():
            try:
                environ = process.environ()  # a slurmstepd has none: it writes its title there
                is_ours = environ.get("SLURM_CONF") == self.environ["SLURM_CONF"]
                if self._logs_as(process, name) or (is_ours and process.cmdline()[-2:] == ["-N", name]):
                    slurms.append(process)
                elif is_ours and environ.get("SLURMD_NODENAME") == name:
                    others.append(process)
            except psutil.Error:
                continue
        for process in (*slurms, *others):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.nodes[name].wait(30)

    def _logs_as(self, process: psutil.Process, name: str) -> bool:
        """Whether a process is a slurmstepd of the node, which only the file that it writes to says."""
        log = str(self.folder / f"slurmd-{name}.log")
        return process.name() == "slurmstepd" and log in (file.path for file in process.open_files())

    def until_down(self, name: str) -> None:
        """Wait until Slurm has seen that a node is lost; sinfo may show the state before for minutes."""
        self.until(lambda: "State=DOWN" in self("scontrol", "show", "node", name), 300)

    def stop(self) -> None:
        self("scancel", "--user=root")
        self.until(lambda: not self("squeue", "-h"), 300)
        for daemon in (*self.nodes.values(), *reversed(self.daemons)):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(30)


def job_of(output: str) -> str:
    """The number of the job that `widemix submit` has said it submitted."""
    return output.splitlines()[-1].split()[1].rstrip(",;")


def summaries(run: Path) -> list[dict]:
    """The summaries of a run's starts, the oldest first."""
    paths = sorted(run.glob("slurm/*/summary.json"), key=lambda path: path.stat().st_mtime)
    return [json.loads(path.read_text()) for path in paths]


def log_of(run: Path) -> str:
    """The logs of a run's jobs, one after the other."""
    return "".join(path.read_text() for path in sorted(run.glob("slurm/*.log")))
