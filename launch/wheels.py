"""Build what a release consists of: the source distribution, a wheel without compiled code, and those for Linux.

The compiler is zig's, a package of PyPI, which has the C library of each Linux and each processor: what it makes on
any machine runs wherever pip installs the wheel. libjpeg-turbo, of the version in Pillow's wheels, is part of each
library, with hidden symbols: another one in the same process is not met.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

from widemix.errors import Exit, InputError
from widemix.native.build import LEVELS, BuildError, compile_library, shipped
from widemix.terminal import print

GLIBC = "2.28"  # Debian 10, RHEL 8 and what is newer
JPEG = "libjpeg-turbo-3.2.0"
JPEG_URL = f"https://github.com/libjpeg-turbo/libjpeg-turbo/releases/download/3.2.0/{JPEG}.tar.gz"
JPEG_SHA256 = "6f30092cef9fb839779646608f4ee14ae3cbac989c47fa05e841b0841f09878e"
JPEG_LICENCES = ("LICENSE.md", "README.ijg")
_CMAKE = (
    *("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_SYSTEM_NAME=Linux"),
    *("-DCMAKE_C_FLAGS=-fvisibility=hidden", "-DCMAKE_POSITION_INDEPENDENT_CODE=ON"),
    *("-DREQUIRE_SIMD=ON", "-DENABLE_SHARED=OFF"),
    *(f"-DWITH_{part}=OFF" for part in ("TURBOJPEG", "TOOLS", "TESTS")),
)
# zig's names of processors.
_ZIG = {f"-march=x86-64-v{number}": f"-mcpu=x86_64_v{number}" for number in (2, 3, 4)}
_ZIG |= {"-march=armv8-a": "-mcpu=generic", "-march=armv8.1-a": "-mcpu=generic+v8_1a"}


def main() -> int:
    """Build all that was asked for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="widemix.launch.wheels", description=__doc__.partition("\n")[0])
    parser.add_argument("--project", type=Path, default=Path(), help="the clone (default: the current folder)")
    parser.add_argument("--to", type=Path, default=Path("dist"), help="the folder of the results (default: dist)")
    parser.add_argument("--jpeg", type=Path, help=f"the sources of {JPEG}, which are downloaded otherwise")
    parser.add_argument("--machines", nargs="*", choices=LEVELS, default=list(LEVELS), help="default: all")
    arguments = parser.parse_args()
    project, dist = arguments.project.resolve(), arguments.to.resolve()
    work = project / "build" / "wheels"
    shutil.rmtree(work, ignore_errors=True)
    try:
        if missing := [name for name in ("cmake", "nasm", "ninja") if not shutil.which(name)]:
            raise InputError(f"{' '.join(missing)}: not installed; apt-get install cmake nasm ninja-build")
        jpeg = check_jpeg(arguments.jpeg or download(project / "build" / JPEG))
        run_setuptools(project, work / "any", "sdist", "--dist-dir", dist)
        run_setuptools(project, work / "any", "build", "bdist_wheel", "--dist-dir", dist)
        for machine in arguments.machines:
            build_wheel(project, work / machine, machine, jpeg.resolve(), dist)
    except (InputError, BuildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return Exit.WRONG_INPUT if isinstance(error, InputError) else Exit.FAILED
    print(*sorted(path.name for path in dist.iterdir()), sep="\n")
    return 0


def download(folder: Path) -> Path:
    """Return the folder of libjpeg-turbo's sources, downloaded if they are not there. Raises `BuildError`."""
    if not folder.exists():
        print(f"downloading {JPEG_URL}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            archive, _ = urllib.request.urlretrieve(JPEG_URL)
        except OSError as error:
            cure = "where there is a network, unpack it; --jpeg FOLDER names the result"
            raise BuildError(f"{JPEG_URL}: {getattr(error, 'reason', error)}; {cure}") from None
        if hashlib.sha256(Path(archive).read_bytes()).hexdigest() != JPEG_SHA256:
            raise BuildError(f"{JPEG_URL}: is not the file it was; its SHA-256 is not {JPEG_SHA256}")
        with tarfile.open(archive) as tar:
            tar.extractall(folder.parent, filter="data")
    return folder


def check_jpeg(folder: Path) -> Path:
    """Check that a folder has the sources of `JPEG`; returns it. Raises `InputError`."""
    cmake = folder / "CMakeLists.txt"
    if not cmake.exists() or f"set(VERSION {JPEG.rpartition('-')[2]})" not in cmake.read_text():
        raise InputError(f"{folder}: has not the sources of {JPEG}; unpack {JPEG_URL}")
    return folder


def build_wheel(project: Path, work: Path, machine: str, jpeg: Path, dist: Path) -> None:
    """Build the wheel for one kind of machine."""
    cc = make_compiler(work, machine)
    flags, libraries = build_jpeg(work / "jpeg", machine, jpeg, cc)
    run_setuptools(project, work, "build")
    native = work / "lib" / "widemix" / "native"
    for name, level in LEVELS[machine].items():
        own = [_ZIG.get(flag, flag) for flag in level.flags]
        target = native / shipped(name).name
        compile_library([str(cc)], target, *own, *flags, "-s", libraries=libraries, timeout=None)
        print(f"compiled {machine} {name}", flush=True)
    for name in JPEG_LICENCES:
        shutil.copy(jpeg / name, native / f"libjpeg-turbo.{name}")
    platform = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    run_setuptools(project, work, "build", "bdist_wheel", "--plat-name", platform, "--dist-dir", dist)


def make_compiler(work: Path, machine: str) -> Path:
    """Write `cc`, `ar` and `ranlib`, which call zig's; returns the path of `cc`."""
    work.mkdir()
    target = f" -target {machine}-linux-gnu.{GLIBC}"
    for name in ("cc", "ar", "ranlib"):
        call = f'exec {sys.executable} -m ziglang {name}{target if name == "cc" else ""} "$@"'
        (work / name).write_text(f"#!/bin/sh\n{call}\n")
        (work / name).chmod(0o755)
    return work / "cc"


def build_jpeg(work: Path, machine: str, jpeg: Path, cc: Path) -> tuple[list[str], list[str]]:
    """Build libjpeg-turbo; returns the flags to compile for it and the libraries to link."""
    tools = [f"-DCMAKE_{name}={cc.with_name(name.lower())}" for name in ("AR", "RANLIB")]
    machine_flags = [f"-DCMAKE_SYSTEM_PROCESSOR={machine}", f"-DCMAKE_C_COMPILER={cc}", *tools]
    run("cmake", "-S", jpeg, "-B", work, *_CMAKE, *machine_flags)
    run("cmake", "--build", work, "--target", "jpeg-static")
    return [f"-I{jpeg / 'src'}", f"-I{work}"], [str(work / "libjpeg.a"), "-lpthread", "-lm"]


def run_setuptools(project: Path, work: Path, *words: object) -> None:
    """Run commands of setuptools that leave everything they make in `work`."""
    work.mkdir(parents=True, exist_ok=True)
    places = [] if "sdist" in words else ["build", "--build-base", work]
    words = tuple(word for word in words if word != "build")
    run(
        *(sys.executable, "-c", "from setuptools import setup; setup()", "-q"),
        *("egg_info", "--egg-base", work, *places, *words),
        folder=project,
    )


def run(*command: object, folder: Path | None = None) -> None:
    """Run a command; raises `BuildError` with the end of what it printed if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
    if done.returncode:
        raise BuildError(f"{' '.join(words[:4])} failed:\n{(done.stdout + done.stderr)[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
