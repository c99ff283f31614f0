"""A terminal in which a process runs, and which may be closed meanwhile."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

from tests.clone import CLONE


class Terminal:
    """A process in a terminal of its own of 80 columns, which `close` closes as ssh does."""

    def __init__(self, *words: str | Path, ignores: bool = False):
        self.own, theirs = pty.openpty()

        def take() -> None:
            os.setsid()
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
            for key in (signal.SIGINT, signal.SIGQUIT):  # which a shell may have ignored for the tests
                signal.signal(key, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores else signal.SIG_DFL)  # the first as nohup does

        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # rows and columns
        command = [sys.executable, *map(str, words)]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        self.process = subprocess.Popen(command, cwd=CLONE, preexec_fn=take, **streams)
        os.close(theirs)

    def wait_for(self, text: bytes, times: int = 1, seconds: float = 300) -> None:
        said, deadline = b"", time.monotonic() + seconds
        while said.count(text) < times:
            ready, _, _ = select.select([self.own], [], [], max(0, deadline - time.monotonic()))
            try:
                piece = os.read(self.own, 1000) if ready else b""
            except OSError:  # of Linux, at the end
                piece = b""
            if not piece:
                self.process.kill()
                code = self.process.wait()  # else a later test is told of it
                raise AssertionError(f"{text!r} was not said in {seconds:.0f} s, exit code {code}: {said!r}")
            said += piece

    def read(self) -> bytes:
        """What has been printed, so that the process need not wait for it."""
        ready, _, _ = select.select([self.own], [], [], 0)
        return os.read(self.own, 100_000) if ready else b""

    def read_to_end(self) -> str:
        """All that is printed until the process has ended."""
        said = b""
        with suppress(OSError):  # of Linux, at the end
            while piece := os.read(self.own, 10_000):
                said += piece
        self.process.wait(600)
        return said.decode()

    def close(self) -> int:
        """The exit code after the terminal was closed."""
        os.close(self.own)
        return self.process.wait(600)
