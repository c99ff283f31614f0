"""Tests that run the C code, which is built with sanitizers for them; numba's functions check their indices.

    python -m tests.stress.sanitized [arguments of pytest]

tests/stress/fuzz.c does it to the JPEG decoder alone. Without arguments these are the tests of loader, file formats,
preparing and batch-last blocks. AddressSanitizer ends a process that reads or writes out of range.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import ROOT
from tests.stress.fuzz import SANITIZERS

TESTS = ("tests/data", "tests/formats", "tests/data_prep", "tests/models/test_batch_last.py")
BUILD = "from widemix.native.build import compiled; print(compiled())"


def preloads() -> dict[str, str]:
    """The environment of a Python that loads sanitized libraries: those of the sanitizers come before all others.

    Raises `OSError` or `CalledProcessError` without a C compiler.
    """
    libraries = ("libasan.so", "libubsan.so")
    paths = [subprocess.check_output(["cc", f"-print-file-name={each}"], text=True).strip() for each in libraries]
    return {"LD_PRELOAD": ":".join(paths), "ASAN_OPTIONS": "detect_leaks=0"}


def main(words: list[str]) -> int:
    """Returns pytest's exit code."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compiler = folder / "cc"  # itself without sanitizers, with which it hangs
        compiler.write_text(f'#!/bin/sh\nexec env -u LD_PRELOAD cc "$@" -g {" ".join(SANITIZERS)}\n')
        compiler.chmod(0o755)
        environ = os.environ | {"CC": str(compiler), "XDG_CACHE_HOME": name}
        environ |= {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(folder / "numba"), "PYTHONPATH": str(ROOT)}
        library = Path(subprocess.check_output([sys.executable, "-c", BUILD], env=environ, text=True).strip())
        if b"__asan_init" not in library.read_bytes():
            raise RuntimeError(f"{library} was built without sanitizers")
        tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", *(words or TESTS)]
        return subprocess.run(tests, env=environ | preloads(), cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
