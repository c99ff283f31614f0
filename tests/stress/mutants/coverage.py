"""Which test files run which lines: `python -m tests.stress.mutants --map`, the time of `make test`.

Every test file runs by itself in a checkout, and each of its processes notes the lines that it runs
(`trace/sitecustomize.py`). The map is kept here, in coverage.json.xz; the command again runs those test files alone
that are new or have changed.
"""

import hashlib
import json
import lzma
import os
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from tests.conftest import ROOT
from tests.stress.mutants.checkout import Checkout, share
from tests.stress.mutants.names import ROOMS
from widemix.files import atomic_write

WORK = ROOT / "runs/mutants"
MAP = Path(__file__).with_name("coverage.json.xz")
LIMIT_S = 900
NO_TESTS = 5  # pytest's exit code where all are left out
SLOW = ("/end_to_end/", "/faults/", "/launch/", "/engine/", "/test_docs", "/test_setup")  # last


def test_files() -> list[str]:
    """All but those by hand and those that a GPU or a cluster runs."""
    files = (path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    chosen = (file for file in files if not file.startswith(("tests/stress/", "tests/gpu/")))
    return sorted(chosen, key=lambda file: (any(room in file for room in SLOW), file))


def digest(file: str, root: Path = ROOT) -> str:
    """Changes with the file's content."""
    return hashlib.sha256((root / file).read_bytes()).hexdigest()[:16]


class Coverage:
    """The map: by test file that is still there its digest, exit code and seconds, and its lines of each file."""

    def __init__(self, entries: dict[str, dict]):
        self.entries = {test: entry for test, entry in entries.items() if (ROOT / test).exists()}

    @classmethod
    def read(cls) -> "Coverage":
        """The kept one; empty if there is none."""
        return cls(json.loads(lzma.decompress(MAP.read_bytes())) if MAP.exists() else {})

    def seconds(self, test: str) -> float:
        """CPU seconds of a test file; 5 where it was not measured."""
        return self.entries[test]["seconds"] if test in self.entries else 5

    def passing(self) -> list[str]:
        """The test files that are not known to fail without a break."""
        return [test for test in test_files() if test not in self.entries or self.entries[test]["code"] == 0]

    def unmeasured(self) -> list[str]:
        """The test files of which nothing is known."""
        return [test for test in test_files() if test not in self.entries]

    def covering(self, file: str, line: int) -> list[str]:
        """The test files that run a line, or the last before it that is known: numba's are not, nor a call's second.

        Of a file that has changed since, any line is taken for any other.
        """
        own = {test: entry for test, entry in self.entries.items() if entry["code"] == 0 and file in entry["lines"]}
        now = digest(file) if own else ""
        same = {test: entry["lines"][file] for test, entry in own.items() if entry["files"][file] == now}
        last = max((each for lines in same.values() for each in lines if each <= line), default=line)
        return [test for test in own if test not in same or last in same[test]]


def measure(checkout: Checkout, test: str) -> dict:
    """Run a test file in a checkout; returns its entry of the map."""
    trace = checkout.folder / "trace"
    shutil.rmtree(trace, ignore_errors=True)
    trace.mkdir()
    environ = checkout.environ() | {"WIDEMIX_TRACE": f"{trace}{os.pathsep}{checkout.root}"}
    environ["PYTHONPATH"] = f"{Path(__file__).parent / 'trace'}{os.pathsep}{environ['PYTHONPATH']}"
    code, lines = checkout.run([test], environ, LIMIT_S, ("--all",)), defaultdict(set)
    seconds = checkout.cpu_seconds
    if code not in (0, NO_TESTS):  # some tests notice that they are traced
        code = checkout.run([test], checkout.environ(), LIMIT_S)
    for path in trace.iterdir():
        for line in path.read_bytes().decode(errors="replace").splitlines():
            name, _, number = line.rpartition(":")
            if number.isdigit():
                lines[name].add(int(number))
    by_file: dict[str, set[int]] = defaultdict(set)
    for name, numbers in lines.items():
        file = Path(name).resolve()
        if file.is_relative_to(checkout.root.resolve()):
            by_file[file.relative_to(checkout.root.resolve()).as_posix()] |= numbers
    kept = {file: sorted(numbers) for file, numbers in sorted(by_file.items()) if file.startswith(ROOMS)}
    files = {file: digest(file, checkout.root) for file in kept}
    return {
        "digest": digest(test),
        "code": code,
        "seconds": round(seconds, 1),
        "lines": kept,
        "files": files,
    }


def main(checkouts: Sequence[Checkout], words: Sequence[str] = ()) -> None:
    """Bring the map up to date, for test files whose path contains one of the words; for all without any."""
    entries = Coverage.read().entries
    wanted = test_files()
    entries = {test: entry for test, entry in entries.items() if test in wanted}
    missing = [test for test in wanted if test not in entries or entries[test]["digest"] != digest(test)]
    missing = [test for test in missing if not words or any(word in test for word in words)]
    writing = Lock()

    def one(test: str, checkout: Checkout) -> None:
        entry = measure(checkout, test)
        print(f"{entry['code']!s:>4} {entry['seconds']:6.1f} s  {test}", flush=True)
        with writing:
            entries[test] = entry
            atomic_write(MAP, lzma.compress(json.dumps(dict(sorted(entries.items()))).encode(), preset=2))

    share(checkouts, missing, one)
