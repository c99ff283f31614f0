"""Finds the compiled C code: the wheel's for this kind of processor, or a library that is compiled here.

A library is compiled once for each version of the sources, compiler and kind of machine, and kept on disk. Its file
name contains a hash of all three, so that different nodes may share a home folder. The file is renamed into place
when it is complete. Of ranks that start at once one builds it, and the others wait; if the file system of the home
folder has no locks on folders, all do, and the last one replaces the others.
"""

import atexit
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from widemix.errors import InputError
from widemix.files import is_ours, wait_for_lock

VARIABLE = "WIDEMIX_NATIVE"  # the code to use: a level or one of OTHERS; the best there is if it is not set
OTHERS = ("native", "none")  # compiled here for this processor; no compiled code


class Level(NamedTuple):
    """A set of instructions. A processor that runs it runs those before it in the table."""

    flags: tuple[str, ...]  # of the compiler
    features: frozenset[str]  # as Linux names them


def _level(flags: str, features: str) -> Level:
    return Level(tuple(flags.split()), frozenset(features.split()))


LEVELS = {
    "x86_64": {
        "v2": _level("-march=x86-64-v2", "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"),
        "v3": _level("-march=x86-64-v3", "abm avx avx2 bmi1 bmi2 f16c fma movbe"),
        "v4": _level("-march=x86-64-v4", "avx512bw avx512cd avx512dq avx512f avx512vl"),
        "vbmi": _level("-march=x86-64-v4 -mavx512vbmi -mpclmul -mvpclmulqdq", "avx512vbmi pclmulqdq vpclmulqdq"),
    },
    "aarch64": {
        "v8": _level("-march=armv8-a", "asimd"),
        "v8.1": _level("-march=armv8.1-a", "asimdrdm atomics crc32"),
    },
}


def runnable() -> dict[str, Level]:
    """The levels that this processor runs, by name, the lowest first."""
    features, found = frozenset(processor().split()), {}
    for name, level in LEVELS.get(platform.machine(), {}).items():
        if not level.features <= features:
            break
        found[name] = level
    return found


def processor() -> str:
    """The line of Linux on the instruction sets of this processor; "" on other systems."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def wanted() -> str:
    """The value of WIDEMIX_NATIVE, or "". Raises `InputError` for one that this processor does not run."""
    value, known, runs = os.environ.get(VARIABLE, ""), LEVELS.get(platform.machine(), {}), runnable()
    if value not in ("", *OTHERS, *known):
        raise InputError(f"{VARIABLE}={value}: is none of {', '.join((*known, *OTHERS))}")
    if value in known and value not in runs:
        missing = sorted(known[value].features.difference(processor().split()))
        lacks = f"has no {' '.join(missing)}" if missing else "lacks instructions of a lower level"
        raise InputError(f"{VARIABLE}={value}: this processor {lacks}; it runs {', '.join(runs) or 'none of them'}")
    return value


SOURCES = Path(__file__).parent
# No contraction to fused multiply-adds: the same results on every machine, and Pillow's.
# No traps of the processor, which nobody looks at: without AVX-512 GCC keeps branches for them instead of vectors.
# -Bsymbolic: our functions call each other, even if another library of the process (FFCV) has the same names.
FLAGS = (
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


def compiled(sources: Path = SOURCES) -> Path:
    """The path of the library for this machine, which is compiled if it is missing. Raises `BuildError`.

    Raises `InputError` for a value of WIDEMIX_NATIVE that is unknown, or that this processor does not run.
    """
    target = planned(sources)
    if not _is_built(target, sources):
        with _locked(target.parent):
            if not _is_built(target, sources):  # still, after another process may have held the lock
                compile_library([find_compiler()], target, *_machine_flags(wanted()), sources=sources)
    return target


def planned(sources: Path = SOURCES) -> Path:
    """The path of the library for this machine, which may still have to be compiled. Raises as `compiled`."""
    level = wanted()
    if sys.platform != "linux":
        raise BuildError("compiled code is for Linux alone")
    if level == "none":
        raise BuildError(f"{VARIABLE}=none")
    for name in [level] if level else reversed(runnable()):
        if shipped(name, sources).exists():
            return shipped(name, sources)
    compiler, folder = find_compiler(), cache_folder()
    kind = " ".join(_machine_flags(level)) if level in runnable() else processor()
    stem = f"native-{platform.machine()}-{_digest(*_contents(sources), kind.encode())}"
    if not compiler:  # a compute node without one may use what a login node built
        built = sorted(filter(is_ours, folder.glob(f"{stem}-*.so")))
        if not built:
            raise BuildError("there is no C compiler (cc); apt-get install gcc libjpeg-dev")
        return built[-1]
    return folder / f"{stem}-{_digest(_output(compiler, '--version').encode())[:8]}.so"


def shipped(level: str, sources: Path = SOURCES) -> Path:
    """The path of a level's library in a wheel; a clone has none."""
    return sources / f"{level}.so"


def cache_folder() -> Path:
    """The user's folder for compiled code; where there is none, a temporary one that only this process uses.

    No shared temporary folder: other users could put code into it.
    """
    return home_cache() or _temporary_folder()


def home_cache() -> Path | None:
    """The user's folder for compiled code; None if it is not writable, or others can write to it too."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "widemix"
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        return home if os.access(home, os.W_OK) and is_ours(home) else None
    except (OSError, RuntimeError):
        return None  # no home, or a read-only one, as in some containers; RuntimeError: nothing says where it is


@functools.cache
def _temporary_folder() -> Path:
    temporary = Path(tempfile.mkdtemp(prefix="widemix-"))
    atexit.register(_remove, temporary, os.getpid())
    return temporary


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not a forked process, whose parent goes on using it
        shutil.rmtree(folder, ignore_errors=True)


def _is_built(target: Path, sources: Path) -> bool:
    return target.exists() and (target.parent == sources or is_ours(target))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which leaves no file behind; without one where its file system has none, as NFS."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            wait_for_lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def find_compiler() -> str:
    """The path of the C compiler: the one that CC names, or the system's; "" if there is none."""
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang") or ""


def _machine_flags(level: str) -> Sequence[str]:
    if level in runnable():
        return runnable()[level].flags
    return [_NATIVE[platform.machine()]] if platform.machine() in _NATIVE else []


def compile_library(
    compiler: Sequence[str],
    target: Path,
    *flags: str,
    libraries: Sequence[str] = _LIBRARIES,
    timeout: float | None = 300,
    sources: Path = SOURCES,
) -> None:
    """Compile all sources into a shared library, which appears whole. Raises `BuildError`, also after `timeout` s."""
    descriptor, name = tempfile.mkstemp(prefix=".native-", suffix=".so", dir=target.parent)
    os.close(descriptor)
    try:
        files = map(str, sorted(sources.glob("*.c")))
        _output(*compiler, *FLAGS, *flags, "-o", name, *files, *libraries, timeout=timeout)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def _output(*command: str, timeout: float | None = 300) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run ({error})") from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} was not done in {timeout:g} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
        cure = "; apt-get install libjpeg-dev" if "jpeg" in errors[0] else ""
        raise BuildError(f"{command[0]} failed: {errors[0].strip()}{cure}")
    return done.stdout


def _contents(sources: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(sources.glob("*.[ch]"))] + [" ".join(FLAGS).encode()]


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
