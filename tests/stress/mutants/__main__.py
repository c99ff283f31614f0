"""Breaks the code on purpose, in one place at a time, and reports which breaks the tests notice.

    python -m tests.stress.mutants [WORD ...] [--jobs N]

Each mutation of tests/stress/mutants/*.yaml is applied to a copy of the checkout, in which its tests must then fail;
without any mutation they must pass. WORDs choose the mutations whose file or title contains one of them. Ends with 1
if a mutation survived, or is refused because its line has changed.
"""

import argparse
import contextlib
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tests.conftest import ROOT
from tests.stress.mutants.mutations import Mutation, mutated, read_mutations

TIMEOUT_S = 600  # a mutation may make the tests hang
OUTCOMES = {0: "passed", 1: "failed"}  # by pytest's exit code
Item = TypeVar("Item", Mutation, str)


class Checkout:
    """A copy of the project to mutate, with compiled code of its own."""

    def __init__(self, folder: Path):
        self.root, self._numba, self._cache = folder / "widemix", folder / "numba", folder / "cache"
        names = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout.decode()
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        self._cache.mkdir()

    def outcome(self, mutation: Mutation) -> str:
        """Apply the mutation, run its tests, undo it: killed, SURVIVED, or how else the tests ended; or REFUSED."""
        path = self.root / mutation.file
        stat, text = path.stat(), path.read_text()
        try:
            changed = mutated(text, mutation)
        except ValueError as error:
            return f"REFUSED: {error};"
        compiled = (
            "@jit" in text or "jit_" in text
        )  # numba does not see that a function from another file has changed
        numba = Path(tempfile.mkdtemp(dir=self._cache)) if compiled else self._numba
        try:
            path.write_text(changed)
            outcome = self.test(mutation.tests, numba)
            return {"passed": "SURVIVED", "failed": "killed"}.get(outcome, outcome)
        finally:
            path.write_text(text)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # what numba has compiled of it stays valid
            if compiled:
                shutil.rmtree(numba)

    def test(self, tests: str, numba: Path | None = None) -> str:
        """Run tests of the copy: passed, failed, or how else they ended. Too slow is failed."""
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(tests)]
        environ = {"NUMBA_CACHE_DIR": str(numba or self._numba), "XDG_CACHE_HOME": str(self._cache)}
        process = subprocess.Popen(
            words,
            cwd=self.root,
            env=os.environ | environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "failed"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what the tests had started
            process.wait()
        return OUTCOMES.get(code, f"pytest ended with {code}")


def in_checkouts(
    work: Callable[[Checkout, Item], str], items: Iterable[Item], checkouts: list[Checkout]
) -> list[str]:
    """What `work` returns for each item, on as many threads as there are checkouts; prints a line for each."""
    free: queue.Queue[Checkout] = queue.Queue()
    for checkout in checkouts:
        free.put(checkout)

    def one(item: Item) -> str:
        checkout, began = free.get(), time.monotonic()
        try:
            outcome = work(checkout, item)
        finally:
            free.put(checkout)
        what = f"{item.file}: {item.title}" if isinstance(item, Mutation) else item
        print(f"{outcome:8} {time.monotonic() - began:4.0f} s  {what}", flush=True)
        return outcome

    with ThreadPoolExecutor(len(checkouts)) as pool:
        return list(pool.map(one, items))


def run(mutations: list[Mutation], jobs: int) -> list[tuple[Mutation, str]]:
    """The mutations that were not killed, with what became of them; `SystemExit` if tests fail without any."""
    with tempfile.TemporaryDirectory(prefix="widemix-mutants-") as folder:
        checkouts = [Checkout(Path(folder) / str(number)) for number in range(jobs)]
        tests = sorted({mutation.tests for mutation in mutations})
        unchanged = in_checkouts(Checkout.test, tests, checkouts)
        failing = [name for name, outcome in zip(tests, unchanged, strict=True) if outcome != "passed"]
        if failing:
            sys.exit(f"error: without any mutation these do not pass: {'; '.join(failing)}")
        outcomes = in_checkouts(Checkout.outcome, mutations, checkouts)
    return [pair for pair in zip(mutations, outcomes, strict=True) if pair[1] != "killed"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only mutations whose file or title contains one")
    parser.add_argument("--jobs", type=int, default=2, help="mutations at a time (default: 2)")
    arguments = parser.parse_args()
    chosen = [
        mutation
        for mutation in read_mutations()
        if not arguments.words or any(word in f"{mutation.file} {mutation.title}" for word in arguments.words)
    ]
    alive = run(chosen, arguments.jobs)
    killed = len(chosen) - len(alive)
    print(f"{killed} of {len(chosen)} mutations killed ({100 * killed / max(1, len(chosen)):.1f} %)")
    for mutation, outcome in alive:
        print(f"{outcome}: {mutation.file}: {mutation.title} ({mutation.tests})")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
