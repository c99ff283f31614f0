"""Compiles the C code, once for each version of the sources, compiler and kind of machine, and keeps it on disk.

The file name contains a hash of all three, so that different nodes may share a home folder. The file is renamed into
place when it is complete. Of ranks that start at once one builds it, and the others wait; if the file system of the
home folder has no locks on folders, all do, and the last one replaces the others.
"""

import atexit
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SOURCES = Path(__file__).parent
# No contraction to fused multiply-adds: the same results on every machine, and Pillow's.
# No traps of the processor, which nobody looks at: without AVX-512 GCC keeps branches for them instead of vectors.
# -Bsymbolic: our functions call each other, even if another library of the process (FFCV) has the same names.
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-shared",
    "-fPIC",
    "-Wl,-Bsymbolic",
)
_NATIVE = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}
_LIBRARIES = ("-ljpeg", "-lpthread", "-lm")


class BuildError(RuntimeError):
    """The C code could not be compiled; the message is one line with the reason."""


def compiled() -> Path:
    """The path of the library for this machine, which is built if it is missing. Raises `BuildError`."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    stem = f"native-{platform.machine()}-{_digest(*_sources(), _cpu())}"
    folder = cache_folder()
    if compiler is None:  # a compute node without one may use what a login node built
        built = sorted(folder.glob(f"{stem}-*.so"))
        if not built:
            raise BuildError("there is no C compiler (cc); apt-get install gcc libjpeg-dev")
        return built[-1]
    target = folder / f"{stem}-{_digest(_output(compiler, '--version').encode())[:8]}.so"
    if not target.exists():
        with _locked(folder):
            if not target.exists():  # still, after another process may have held the lock
                _compile(compiler, target)
    return target


def cache_folder() -> Path:
    """The user's folder for compiled code; if it is not writable, a temporary one that only this process uses.

    No shared temporary folder: other users could put code into it.
    """
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "widemix"
        home.mkdir(parents=True, exist_ok=True)
        if os.access(home, os.W_OK):
            return home
    except (OSError, RuntimeError):
        pass  # no home, or a read-only one, as in some containers; RuntimeError: nothing says where it is
    return _temporary_folder()


@functools.cache
def _temporary_folder() -> Path:
    temporary = Path(tempfile.mkdtemp(prefix="widemix-"))
    atexit.register(_remove, temporary, os.getpid())
    return temporary


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not a forked process, whose parent goes on using it
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which leaves no file behind; without one where its file system has none, as NFS."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile(compiler: str, target: Path) -> None:
    descriptor, name = tempfile.mkstemp(prefix=".native-", suffix=".so", dir=target.parent)
    os.close(descriptor)
    native = [_NATIVE[platform.machine()]] if platform.machine() in _NATIVE else []
    arguments = [*_FLAGS, *native, "-o", name, *map(str, sorted(SOURCES.glob("*.c"))), *_LIBRARIES]
    try:
        _output(compiler, *arguments)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run ({error})") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
        cure = "; apt-get install libjpeg-dev" if "jpeg" in errors[0] else ""
        raise BuildError(f"{command[0]} failed: {errors[0].strip()}{cure}")
    return done.stdout


def _sources() -> list[bytes]:
    return [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))] + [" ".join(_FLAGS).encode()]


def _cpu() -> bytes:
    """The instruction sets of this processor, which `-march=native` depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "").encode()


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
