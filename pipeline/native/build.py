"""Compiling the C part: once for these sources, this compiler and this kind of machine, and kept on disk.

The name of the file says all that it was made from, so that nodes of several kinds may share a home folder. It is
renamed into place when it is whole: ranks that start at once build it side by side, and the last one's stays.
"""

import atexit
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
# No contraction to fused multiply-adds: the same numbers on every machine, and Pillow's.
# -Bsymbolic: a function of ours calls ours, whatever other libraries of this process (FFCV) call theirs.
_FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-shared", "-fPIC", "-Wl,-Bsymbolic")
_NATIVE = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}
_LIBRARIES = ("-ljpeg", "-lpthread", "-lm")


class BuildError(RuntimeError):
    """The C part could not be compiled: one line, which says why."""


def compiled() -> Path:
    """The compiled library of these sources for this machine, made where it is missing, or `BuildError`."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    stem = f"native-{platform.machine()}-{_digest(*_sources(), _cpu())}"
    folder = cache_folder()
    if compiler is None:  # a compute node without one, beside a set-up that had one
        made = sorted(folder.glob(f"{stem}-*.so"))
        if not made:
            raise BuildError("there is no C compiler (cc); apt-get install gcc libjpeg-dev")
        return made[-1]
    target = folder / f"{stem}-{_digest(_output(compiler, '--version').encode())[:8]}.so"
    if not target.exists():
        _compile(compiler, target)
    return target


def cache_folder() -> Path:
    """Where compiled code of this user stays; else a folder of this process alone, since code on disk is run."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "widemix"
    try:
        home.mkdir(parents=True, exist_ok=True)
        if os.access(home, os.W_OK):
            return home
    except OSError:
        pass  # a home that is not there or may not be written, as in some containers
    alone = Path(tempfile.mkdtemp(prefix="widemix-"))
    atexit.register(shutil.rmtree, alone, ignore_errors=True)
    return alone


def _compile(compiler: str, target: Path) -> None:
    descriptor, name = tempfile.mkstemp(prefix=".native-", suffix=".so", dir=target.parent)
    os.close(descriptor)
    native = [_NATIVE[platform.machine()]] if platform.machine() in _NATIVE else []
    words = [*_FLAGS, *native, "-o", name, *map(str, sorted(SOURCES.glob("*.c"))), *_LIBRARIES]
    try:
        _output(compiler, *words)
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
    """What this kind of processor can do, which is what the compiler makes use of."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "").encode()


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
