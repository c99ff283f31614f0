"""Breaks the code where it was broken before, in one place at a time, and reports which breaks the tests notice.

    python -m tests.stress.mutants.known [WORD ...] [--jobs N]

Each mutation of tests/stress/mutants/*.yaml is applied to a copy of the checkout, in which its tests must then fail;
without any mutation they must pass. WORDs choose the mutations whose file or title contains one of them. Ends with 1
if a mutation survived, or is refused because its line has changed.
"""

import argparse
import queue
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tests.stress.mutants.checkout import Checkout
from tests.stress.mutants.mutations import Mutation, mutated, read_mutations

TIMEOUT_S = 600  # a mutation may make the tests hang
OUTCOMES = {0: "passed", 1: "failed", None: "failed"}  # by pytest's exit code
Item = TypeVar("Item", Mutation, str)


def outcome(checkout: Checkout, mutation: Mutation) -> str:
    """Apply the mutation, run its tests, undo it: killed, SURVIVED, or how else the tests ended; or REFUSED."""
    try:
        changed = mutated((checkout.root / mutation.file).read_text(), mutation)
    except ValueError as error:
        return f"REFUSED: {error};"
    with checkout.changed(mutation.file, changed) as environ:
        ended = run_tests(checkout, mutation.tests, environ)
    return {"passed": "SURVIVED", "failed": "killed"}.get(ended, ended)


def run_tests(checkout: Checkout, tests: str, environ: dict[str, str] | None = None) -> str:
    """Run tests of the copy: passed, failed, or how else they ended. Too slow is failed."""
    code = checkout.run(shlex.split(tests), environ or checkout.environ(), TIMEOUT_S)
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
            ended = work(checkout, item)
        finally:
            free.put(checkout)
        what = f"{item.file}: {item.title}" if isinstance(item, Mutation) else item
        print(f"{ended:8} {time.monotonic() - began:4.0f} s  {what}", flush=True)
        return ended

    with ThreadPoolExecutor(len(checkouts)) as pool:
        return list(pool.map(one, items))


def run(mutations: list[Mutation], jobs: int) -> list[tuple[Mutation, str]]:
    """The mutations that were not killed, with what became of them; `SystemExit` if tests fail without any."""
    with tempfile.TemporaryDirectory(prefix="widemix-mutants-") as folder:
        checkouts = [Checkout(Path(folder) / str(number)) for number in range(jobs)]
        tests = sorted({mutation.tests for mutation in mutations})
        unchanged = in_checkouts(run_tests, tests, checkouts)
        failing = [name for name, ended in zip(tests, unchanged, strict=True) if ended != "passed"]
        if failing:
            sys.exit(f"error: without any mutation these do not pass: {'; '.join(failing)}")
        outcomes = in_checkouts(outcome, mutations, checkouts)
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
    for mutation, ended in alive:
        print(f"{ended}: {mutation.file}: {mutation.title} ({mutation.tests})")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
