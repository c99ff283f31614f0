"""numba's decorators with this project's settings: without the GIL, without fast-math, cached on disk.

numba's cache misses changes of functions and constants that a cached function has from another file, so the cache
folder, in NUMBA_CACHE_DIR too, is named after numba's version and a hash of all sources, and of whether the code
calls the C library.

`run_on_threads` runs such functions on Python threads instead of numba's prange: nothing is compiled twice, no
threading layer has to be installed, and numba's cache is not involved, which confuses the parallel and the serial
code of a function.
"""

import ctypes
import functools
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, Timer
from typing import Any

import numba
from llvmlite import binding
from numba import types
from numba.core import event
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu import CPUTargetOptions
from numba.core.options import TargetOptions

from widemix import native
from widemix.files import is_ours
from widemix.native.build import cache_folder, home_cache
from widemix.terminal import print


def numba_folder(sources: Path, calls_c: bool) -> Path:
    """Return the folder that compiled functions of these sources are kept in, and make it."""
    digest = hashlib.sha256()
    for source in sorted(sources.rglob("*.py")):
        digest.update(source.read_bytes())
    digest.update(b"C" if calls_c else b"")
    name = f"numba-{numba.__version__}-{digest.hexdigest()[:16]}"
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given:
        try:
            Path(given, name).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            return Path(given)  # in whose place numba takes another folder
        if is_ours(Path(given, name)):  # numba runs what it finds there
            return Path(given, name)
    folder = cache_folder() / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# numba reads a file of the current folder, a stranger's perhaps, again and again: also where compiled code is cached.
numba.core.config._config_fname = os.devnull
numba.config.reload_config()
numba.config.CACHE_DIR = str(numba_folder(Path(__file__).parent, native.load() is not None))  # type: ignore[attr-defined]

# Held during a fork, so that no other thread holds it: in the forked process nobody would release it.
if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )

jit: Any = functools.partial(numba.njit, nogil=True, cache=True, error_model="numpy")

# numba supports LLVM's `noalias` but has no option for it. Without it loops that gather from or write to several
# arrays are not vectorised: shear and rotate are four times slower.
CPUTargetOptions.noalias = TargetOptions.Mapping("noalias")

jit_noalias: Any = functools.partial(jit, noalias=True)
"""`jit` for functions of which no two array arguments overlap."""

jit_inline: Any = functools.partial(jit_noalias, inline="always")
"""`jit_noalias`, inlined into the caller by numba: for the arithmetic of one value, so that LLVM has a single loop to
vectorise; and for functions that mostly call others, which LLVM would otherwise optimise again in each caller."""


def compilation_notice() -> str:
    """Return the line that says what takes so long."""
    kept = os.environ.get("NUMBA_CACHE_DIR") or home_cache()
    often = (
        "which are kept for later runs"
        if kept
        else "in each run, as there is no cache folder that is this user's alone (XDG_CACHE_HOME names one)"
    )
    return f"compiling the functions that prepare these batches, {often}; 5 to 40 seconds"


class CompilationNotice(event.Listener):
    """Says once on stderr that functions of ours are being compiled, where that takes a while: the cache is empty."""

    def __init__(self, after: float) -> None:
        self._after, self._depth = after, 0
        self._timer: Timer | None = None

    def on_start(self, event: Any) -> None:
        """Called before a function is compiled, of which some are compiled while others are."""
        ours = event.data["dispatcher"].py_func.__module__.startswith("widemix.")
        if self._timer is None and ours and os.environ.get("RANK", "0") == "0":
            self._timer = Timer(self._after, print, [compilation_notice()], {"file": sys.stderr, "flush": True})
            self._timer.daemon = True
            self._timer.start()
        self._depth += 1

    def on_end(self, event: Any) -> None:
        """Called after it; what was compiled in a moment is not worth a line."""
        self._depth -= 1
        if self._depth == 0 and self._timer and not self._timer.finished.is_set():
            self._timer.cancel()
            self._timer = None


event.register("numba:compile", CompilationNotice(after=2.0))


def native_symbol(name: str, signature: Any) -> Any:
    """A function of the C library for use in compiled code; None where the library cannot be built.

    It is called by name: numba cannot cache code that calls a ctypes function, which is an address.
    """
    library = native.load()
    if library is None:
        return None
    binding.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    return types.ExternalFunction(name, signature)


def optional_symbol(name: str, signature: Any) -> Any:
    """A C function that returns whether it has done its work; one that returns false where there is no library."""
    return native_symbol(name, signature) or _undone


@jit
def _undone(*arguments):
    return False


def run_on_threads(work: Callable[[int, int], None], threads: int) -> None:
    """Call `work(k, threads)` for each k in range(threads) in parallel, then raise the first exception."""
    if threads == 1:
        work(0, 1)
        return
    tasks, ended = _tasks(threads), SimpleQueue[None]()
    errors: list[BaseException | None] = [None] * threads
    for k in range(threads):
        tasks.put((work, k, errors, ended))
    for _ in range(threads):
        ended.get()
    error = next(filter(None, errors), None)
    if error:
        try:
            raise error
        finally:
            del error, errors  # whose frame the error has


_TASKS: dict[int, SimpleQueue] = {}  # of so many threads


def _tasks(threads: int) -> SimpleQueue:
    """The tasks of so many threads. A future of concurrent.futures would take ten times a task's time in Python."""
    new: SimpleQueue = SimpleQueue()
    tasks = _TASKS.setdefault(threads, new)
    if tasks is new:
        for k in range(threads):
            Thread(target=_serve, args=[tasks], name=f"images_{k}", daemon=True).start()
    return tasks


def _serve(tasks: SimpleQueue) -> None:
    while True:
        work, k, errors, ended = tasks.get()
        try:
            work(k, len(errors))
        except BaseException as error:
            errors[k] = error
        del work, errors  # which nothing is to keep until the next task
        ended.put(None)


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_TASKS.clear)  # a forked process has none of the threads, and would wait
