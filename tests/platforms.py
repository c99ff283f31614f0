"""Import every module, then run commands, where Python has no more than on Windows, less than macOS has.

python -m tests.platforms 'cost digits/rp_mixer' ...
"""

import ast
import builtins
import contextlib
import ctypes
import importlib
import importlib.abc
import io
import os
import pkgutil
import platform
import select
import shlex
import signal
import sys
from collections.abc import Iterator

from tests.conftest import ROOT

ABSENT = {
    os: "posix_fadvise posix_fallocate sched_getaffinity sched_setaffinity memfd_create eventfd copy_file_range "
    "fork register_at_fork pread preadv pwrite getuid geteuid getpgid killpg setsid statvfs uname sysconf",
    select: "epoll poll",
    signal: "SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGKILL SIGPIPE SIGALRM SIGCHLD pthread_sigmask sigwait setitimer",
}
ABSENT_MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "readline")


class Refusing(importlib.abc.MetaPathFinder):
    """Finds none of the modules that are absent."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, fullname, path=None, target=None):
        """As importlib calls it."""
        if fullname in self.names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def files():
    """All Python files of the package."""
    return [path for folder in ("pipeline", "data_prep", "launch") for path in (ROOT / folder).rglob("*.py")]


def import_others() -> None:
    """Import what our modules import of other packages, which know themselves what their systems lack.

    Not what a function imports when it is called, but for what the commands need.
    """
    for path in files():
        for node in _at_import(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.partition(".")[0] not in ("widemix", "ffcv"):
                    with contextlib.suppress(ImportError):
                        importlib.import_module(name)


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when their module is imported."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from _at_import(child)


def pretend() -> None:
    """Take from Python what it lacks on Windows; /proc, /sys and the C library by ctypes are gone too."""
    platform.uname(), platform.platform()
    sys.platform = "win32"
    for module, names in ABSENT.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for name in ABSENT_MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Refusing(ABSENT_MODULES))
    readers = [(builtins, "open"), (io, "open"), *((os, name) for name in ("open", "stat", "readlink", "listdir"))]
    for owner, name in readers:
        setattr(owner, name, _without_proc(getattr(owner, name)))
    ctypes.CDLL = _NoLibc


def _without_proc(function):
    def call(path, *arguments, **options):
        if not isinstance(path, int) and os.fspath(path).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *arguments, **options)

    return call


class _NoLibc(ctypes.CDLL):
    def __init__(self, name, *arguments, **options):
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        super().__init__(name, *arguments, **options)


def main() -> int:
    """Import and run all; the exit code is that of the first command that fails."""
    import_others()
    pretend()
    import widemix

    for module in pkgutil.walk_packages(widemix.__path__, "widemix."):
        if module.name.rpartition(".")[2] != "__main__" and module.name != "widemix.ffcv":
            importlib.import_module(module.name)
    from widemix.cli.commands import run_command
    from widemix.cli.parser import make_parser

    for command in sys.argv[1:]:
        if code := run_command(make_parser(), argv=shlex.split(command)):
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
