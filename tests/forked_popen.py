"""`python -m widemix ...` that a fork of `tests.forks` starts: a fork of it, with all that it has imported.

What subprocess promises holds: a process of its own with a pid, pipes, signals, exit code and environment. A process
that has started threads is not forked: it starts a new Python, as all others do.
"""

import atexit
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_COMMAND = [sys.executable, "-m", "widemix"]


class ForkedPopen(subprocess.Popen):
    """As subprocess's, but for `python -m widemix`, which is forked."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *others: Any) -> None:
        """Of CPython 3.11 to 3.14: `others` are keyword arguments' values, in the order of its `__init__`."""
        if list(args[:3]) != _COMMAND or len(list(Path("/proc/self/task").iterdir())) > 1:
            super()._execute_child(args, executable, preexec_fn, *others)  # type: ignore[misc]
            return
        _, pass_fds, cwd, env, _, _, _, *pipes = others[:13]
        sys.stdout.flush()
        sys.stderr.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if not self.pid:
            _be(list(args[3:]), preexec_fn, pass_fds, cwd, env, pipes, others[18], before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _be(
    words: Sequence[str],
    prepare: Callable[[], None] | None,
    pass_fds: Sequence[int],
    cwd: Any,
    env: Mapping[str, str] | None,
    pipes: Sequence[int],
    new_session: bool,
    mask: set[signal.Signals],
) -> None:
    """In the fork, which ends here."""
    code: Any = 1
    try:
        _leave_parent(cwd, env, pipes)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):  # as exec does
                ours = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, ours)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if new_session:
            os.setsid()
        if prepare:
            prepare()
        _close({0, 1, 2, *pass_fds})
        sys.argv = ["widemix", *words]
        runpy.run_module("widemix", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
        except OSError as error:
            print(f"Exception ignored in: {sys.stdout}\n{error!r}", file=sys.stderr)
            code = 120
        os._exit(code)


def _leave_parent(cwd: Any, env: Mapping[str, str] | None, pipes: Sequence[int]) -> None:
    atexit._clear()
    given = {0: pipes[0], 1: pipes[3], 2: pipes[5]}
    for stream, pipe in given.items():
        if pipe not in (-1, stream):
            os.dup2(pipe, stream)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if cwd is not None:
        os.chdir(cwd)
    if env is not None:
        os.environ.clear()
        os.environ |= env


def _close(kept: set[int]) -> None:
    """Let go of other files, whose numbers stay taken: objects of the parent may still close them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept | {nothing} and os.path.exists(f"/proc/self/fd/{name}"):
            os.dup2(nothing, int(name), inheritable=False)
