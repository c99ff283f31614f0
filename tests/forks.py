"""Processes forked from one that has imported everything: real ones, to signal and to kill, started in a moment.

The one is multiprocessing's fork server, which the first of them starts.
"""

import atexit
import faulthandler
import itertools
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tests.clone import CLONE

PRELOADED = "tests.everything"
# Below those that the kernel gives to whoever asks for any port, which another test would be given at any moment, and
# below those of widemix.distributed.launchers. Processes begin at different ones.
_PORTS = range(10_000, 20_000)
_next_port = itertools.count(97 * os.getpid())


class Forks:
    """Processes that each call `target(*words)` on one thread, from the project's root; by number, from 0.

    There is one for each of `environs`, which is added to what it has. All append what they say to `log`.
    """

    def __init__(self, target: Callable[..., Any], *words: Any, log: Path, environs: Sequence[Mapping] = ({},)):
        start_server()
        context = multiprocessing.get_context("forkserver")
        log.touch()
        self.log, self._began = log, log.stat().st_size
        self.codes: dict[int, int] = {}  # exit codes, or minus a signal
        self.running = {
            number: context.Process(target=_be, args=(target, words, dict(environ), log))
            for number, environ in enumerate(environs)
        }
        for process in self.running.values():
            process.start()

    def wait(self, seconds: float = 900) -> tuple[list[int], str]:
        """Every exit code, and what they said. They must all end by themselves."""
        deadline = time.monotonic() + seconds
        while self.running:
            self.reap()
            if time.monotonic() > deadline:
                still = sorted(self.running)
                self.signal(signal.SIGUSR2)  # each writes the stacks of its threads to the log
                time.sleep(2)
                self.kill()
                raise TimeoutError(f"{still} still run after {seconds:.0f} s:\n{self.said()}")
            time.sleep(0.02)
        return [code for _, code in sorted(self.codes.items())], self.said()

    def reap(self) -> None:
        """Note which have ended."""
        for number, process in list(self.running.items()):
            if process.exitcode is not None:
                self.codes[number] = process.exitcode
                del self.running[number]

    def said(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_bytes()[self._began :].decode())

    def signal(self, number: int) -> None:
        for process in self.running.values():
            with suppress(ProcessLookupError):  # it has ended since `reap`
                os.kill(process.pid, number)

    def kill(self) -> None:
        """With all that they have started."""
        for process in self.running.values():
            for kill in (os.killpg, os.kill):  # the second if it leads no group yet
                with suppress(ProcessLookupError):
                    kill(process.pid, signal.SIGKILL)


def start_server() -> None:
    """Start the process to fork from unless it runs."""
    forkserver.set_forkserver_preload([PRELOADED])
    with chdir(CLONE):  # else it starts without `tests`, says nothing, and each fork imports everything by itself
        forkserver.ensure_running()


def _be(target: Callable[..., Any], words: Sequence[Any], environ: dict[str, str], log: Path) -> None:
    """In the fork."""
    atexit._clear()  # what the server does at its end
    assert PRELOADED in sys.modules, f"the fork server could not import {PRELOADED}"
    os.setsid()
    os.chdir(CLONE)
    os.environ |= environ
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)  # one that crashes says where
    faulthandler.register(signal.SIGUSR2, file=sys.stderr)
    target(*words)


def free_port() -> int:
    """A port that nobody else is likely to take before the caller does."""
    while True:
        port = _PORTS[next(_next_port) % len(_PORTS)]
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: what has just ended is free
            probe.bind(("", port))
            return port


def group_of(world: int) -> list[dict[str, str]]:
    """What a launcher tells each rank of a group on this machine."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    return [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def be_widemix(*words: str) -> None:
    """`widemix WORDS`; what it starts by `python -m widemix` are forks too."""
    import widemix.cli
    from tests.forked_popen import ForkedPopen

    _on_one_thread()
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    sys.argv = ["widemix", *words]
    widemix.cli.main()


def be_rank(*words: str) -> None:
    """`python -m widemix train WORDS`."""
    be_widemix("train", *words)


def _on_one_thread() -> None:
    """Two threads beside other work wait for each other most of the time."""
    from widemix.distributed import topology

    topology.share_cpus = lambda _: 1
