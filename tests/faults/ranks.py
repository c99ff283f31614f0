"""Ranks as forks of one process that has imported everything: real processes to kill, in a second each."""

import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import deepspeed  # noqa: F401
import timm  # noqa: F401
import torchmetrics.classification  # noqa: F401

import pipeline.engine.ddp
import pipeline.engine.deepspeed
import pipeline.engine.fsdp
import pipeline.finetune
import pipeline.loop  # noqa: F401
from pipeline import topology
from tests.conftest import SMALL
from tests.faults.faulty import train_with

RECIPE = "recipes/digits/rp_mixer.yaml"
BATCH = 48  # divides by 1, 2, 3 and 4 ranks, in groups of 4
FIXED = (*SMALL, "--train.epochs", "2", "--schedule.warmup_epochs", "1", "--augment.mix_group", "4")


class Ranks:
    """So many ranks of `python -m pipeline.train` on the digits, with a fault built in; see `tests.faults.faulty`."""

    def __init__(self, world: int, fault: str, data: Path, run: Path, *options: str):
        words = (RECIPE, "--data.path", str(data), "--run-dir", str(run), "--train.global_batch", str(BATCH))
        self.log = run.with_suffix(".log")
        self._began = self.log.stat().st_size if self.log.exists() else 0
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        place = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": str(world),
        }
        place["LOCAL_WORLD_SIZE"] = str(world)
        self.running: dict[int, int] = {}  # process -> rank
        self.codes: dict[int, int] = {}  # rank -> exit code, or minus a signal
        for rank in range(world):
            process = os.fork()
            if process == 0:
                os.environ |= {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                _be(fault, [*words, *FIXED, *options], self.log)
            self.running[process] = rank

    def wait(self, seconds: float = 300) -> tuple[dict[int, int], str]:
        """Every rank's exit code, and what they said. They must all end by themselves."""
        deadline = time.monotonic() + seconds
        while self.running:
            self.reap()
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"ranks {sorted(self.running.values())} go on for ever:\n{self.said()}")
            time.sleep(0.02)
        return self.codes, self.said()

    def reap(self) -> None:
        """Note which ranks have ended."""
        for process in list(self.running):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                self.codes[self.running.pop(process)] = os.waitstatus_to_exitcode(status)

    def said(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text()[self._began :])

    def kill(self) -> None:
        for process in self.running:
            os.kill(process, signal.SIGKILL)


def _be(fault: str, words: list[str], log: Path) -> None:
    """Turn a fork into a rank; never returns."""
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(output, stream)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        topology.share_cpus = lambda _: 1  # two threads beside other work wait for each other most of the time
        train_with(fault, words)
    finally:
        os._exit(70)  # unless it has ended by itself
