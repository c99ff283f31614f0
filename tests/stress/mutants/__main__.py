"""Breaks the code in places that nobody chose, one at a time, and lists the breaks that no test notices.

    python -m tests.stress.mutants [--seed N] [--count N] [--only WORD] [--jobs N]

The places are sampled from the syntax trees, a room as often as its lines are many. For each the tests that run its
line do so, by the map of `tests.stress.mutants.coverage`: those of the room first, for as long as --budget allows.
Where there is no map it is made first; not so with --only, where the tests of the room and those that import the
module run. A break that makes them hang is noticed. Outcomes, and the test that noticed each, are kept in
runs/mutants/SEED.jsonl, from which the same command goes on. equivalent.yaml lists breaks that change nothing that a
test could hold, each with the reason. Ends with 1 where fewer than `LEAST` of them are noticed.
"""

import argparse
import ast
import difflib
import json
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import yaml

from tests.conftest import ROOT
from tests.stress.mutants import coverage
from tests.stress.mutants.checkout import Checkout
from tests.stress.mutants.coverage import NO_TESTS, ROOMS, WORK, Coverage
from tests.stress.mutants.mutations import EQUIVALENT
from tests.stress.mutants.sites import Site, sites
from widemix.cgroups import usable_cpus

LEAST = 0.9
# Tests of these names, those first that notice most.
BLOCKS = ("batch_last_by_c", "reorder", "fuzz", "sanitized", "build", "registers")
IMAGES = ("decode", "coefficients", "shrink", "restart", "data/augment", "checksum", "native/", "golden")
_MORE = 3  # times the budget for the test files that name the module
_OF_BLOCKS = ("mix", "products", "block", "reorder", "move", "lanes")  # files of C that begin so


class Broken(NamedTuple):
    """A break as it is kept: `outcome` is noticed or hung, survived or uncovered, or equivalent."""

    room: str
    site: Site
    old: str  # line
    new: str
    outcome: str
    seconds: float
    test: str = ""  # that noticed it


def room_of(file: str) -> str:
    """The package that a file belongs to."""
    first, second, *rest = Path(file).parts
    return f"{first}/{second}" if first == "pipeline" and rest else first


def sources() -> dict[str, str]:
    """The text of every file that can be broken, by path."""
    files = (path for room in ROOMS for kind in ("*.py", "*.c", "*.h") for path in (ROOT / room).rglob(kind))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(files) if path.is_file()}


def sample(texts: dict[str, str], seed: int, count: int, only: str) -> list[Site]:
    """Different places, the same for a seed, the first of more are those of fewer."""
    by_room: dict[str, dict[tuple[str, int], list[Site]]] = {}
    lines: Counter[str] = Counter()
    for file, text in texts.items():
        if only in file:
            lines[room_of(file)] += text.count("\n")
            for site in sites(file, text):
                by_room.setdefault(room_of(file), {}).setdefault((file, site.line), []).append(site)
    rooms, numbers, found = sorted(by_room), random.Random(seed), dict[Site, None]()
    most = sum(len(own) for places in by_room.values() for own in places.values())
    while len(found) < min(count, most // 2):
        [room] = numbers.choices(rooms, [lines[room] for room in rooms])
        place = numbers.choice(list(by_room[room]))
        site = numbers.choice(by_room[room][place])
        if site.is_code(texts[site.file]):
            found[site] = None
    return list(found)


def tests_of(site: Site, text: str, covered: Coverage, budget: float) -> list[list[str]]:
    """The test files that run a place, those of its room first, then the others, within a budget of seconds.

    Those that name the module have `_MORE` times as many. Of those that the map has not, the ones of the room, and
    those that import the module. At last, with a budget of their own, those that have changed since the map was made
    and may run the place by now, of the room and by name. For C, which the map has not, those of its kind.
    """
    stem, room = Path(site.file).stem, f"tests/{room_of(site.file).removeprefix('pipeline/')}/"
    module = ".".join(["widemix", *Path(site.file.removeprefix("pipeline/")).with_suffix("").parts])

    def split(tests: list[str]) -> tuple[list[str], list[str], list[str]]:
        """Those that name the module, the other ones of its room, and all others."""
        named = [test for test in tests if stem in test or module in (ROOT / test).read_text()]
        own = [test for test in tests if test.startswith(room) and test not in named]
        return named, own, [test for test in tests if test not in (*named, *own)]

    if not site.file.endswith(".py"):
        names = BLOCKS if stem.startswith(_OF_BLOCKS) else IMAGES
        found = [test for name in (stem, *names) for test in covered.passing() if name in test]
        return [_Within(covered, budget).take(list(dict.fromkeys(found)), _MORE)]
    found = covered.covering(site.file, [site.line])
    for lines in _around(site.line, text):
        found = found or covered.covering(site.file, lines)
    named, own, _ = split(covered.unmeasured())
    found += named + own
    found.sort(key=covered.seconds)
    named, own, others = split(found)
    later = split([test for test in covered.may_run(site.file) if test not in found])
    within, again = _Within(covered, budget), _Within(covered, budget)
    parts = [within.take(named, _MORE) + within.take(own), within.take(others)]
    parts.append(again.take(later[0], _MORE) + again.take(later[1]))
    return [part for part in parts if part] or [found[:1]] * bool(found)


class _Within:
    """Takes test files as long as they are within a budget of seconds."""

    def __init__(self, covered: Coverage, budget: float):
        self._covered, self._budget, self._spent = covered, budget, 0.0

    def take(self, tests: list[str], times: float = 1) -> list[str]:
        """Those that are within so many times the budget, with all that were taken before."""
        kept = []
        for test in tests:
            if self._spent + self._covered.seconds(test) <= times * self._budget:
                kept.append(test)
                self._spent += self._covered.seconds(test)
        return kept


def _around(line: int, text: str) -> list[range]:
    """The lines of the statement that a line is in, of its function, and all of a file whose lines numba compiles."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    spans = [range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in nodes]
    inside = sorted((span for span in spans if line in span), key=len)
    compiled = [range(1, text.count("\n") + 2)] if "jit" in text else []
    return [*inside[:2], *inside[-1:], *compiled]


def equivalent() -> set[tuple[str, str, str]]:
    """The breaks of equivalent.yaml: file, old and new line."""
    known = yaml.safe_load(EQUIVALENT.read_text()) or {} if EQUIVALENT.exists() else {}
    return {(file, each["old"], each["new"]) for file, own in known.items() for each in own}


def changed_lines(old: str, new: str) -> tuple[str, str]:
    """What a diff shows of a break, without indentation."""
    diff = [line for line in difflib.ndiff(old.splitlines(), new.splitlines()) if line[:2] in ("- ", "+ ")]
    return tuple("\n".join(line[2:].strip() for line in diff if line[0] == sign) for sign in "-+")  # type: ignore


def outcome(site: Site, text: str, checkout: Checkout, covered: Coverage, parts: list[list[str]]) -> tuple[str, str]:
    """Break a checkout, and run tests; returns how that ended, and the test that noticed: one that passes without."""
    while True:
        ended, test = _broken(site, text, checkout, covered, parts)
        if ended != "noticed" or not test or checkout.passes(test):
            return ended, test
        print(f"fails without a break, left out from here on: {test}", flush=True)


def _broken(site: Site, text: str, checkout: Checkout, covered: Coverage, parts: list[list[str]]) -> tuple[str, str]:
    """The same, where all tests pass without a break."""
    with checkout.changed(site.file, site.changed(text)) as environ:
        slow = 120 if "numba" not in Path(environ["NUMBA_CACHE_DIR"]).name or site.file.endswith((".c", ".h")) else 0
        for tests in parts:
            seconds = (60 + slow + 3 * sum(map(covered.seconds, tests))) * max(1, os.getloadavg()[0] / usable_cpus())
            code = checkout.run(tests, environ, seconds)
            if code not in (0, NO_TESTS):
                return "hung" if code is None else "noticed", checkout.failed()
    return "survived" if parts else "uncovered", ""


NOTICED = ("noticed", "hung")


def table(broken: list[Broken]) -> str:
    """A row for each room: how many breaks, and how many of them were noticed."""
    rows = ["| room | breaks | noticed | |", "|---|---:|---:|---:|"]
    counted = [each for each in broken if each.outcome != "equivalent"]
    for room in [*sorted({each.room for each in counted}), "all"]:
        own = [each for each in counted if room in (each.room, "all")]
        noticed = sum(each.outcome in NOTICED for each in own)
        rows.append(f"| {room} | {len(own)} | {noticed} | {100 * noticed / max(1, len(own)):.0f} % |")
    return "\n".join(rows)


def report(broken: list[Broken]) -> int:
    """Print the survivors and the table; returns the exit code."""
    for each in broken:
        if each.outcome in ("survived", "uncovered"):
            print(f"{each.site.file}:{each.site.line}: {each.outcome}\n  - {each.old}\n  + {each.new}")
    print(table(broken))
    counted = [each.outcome in NOTICED for each in broken if each.outcome != "equivalent"]
    hung = sum(each.outcome == "hung" for each in broken)
    others = f"{hung} of these by a time limit; {len(broken) - len(counted)} more are equivalent"
    print(f"{sum(counted)} of {len(counted)} noticed, {others}")
    return int(sum(counted) < LEAST * len(counted))


def read(path: Path, known: set[tuple[str, str, str]]) -> dict[Site, Broken]:
    """What was kept of a seed."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        values: dict[str, Any] = json.loads(line)
        each = Broken(**values | {"site": Site(*values["site"])})
        if (each.site.file, each.old, each.new) in known:
            each = each._replace(outcome="equivalent")
        found[each.site] = each
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="another seed breaks other places (default: 0)")
    parser.add_argument("--count", type=int, default=300, help="how many (default: 300)")
    parser.add_argument("--only", default="", metavar="WORD", help="files whose path contains it")
    only = "only bring the map up to date, for test files whose path contains a word if there is one"
    parser.add_argument("--map", nargs="*", metavar="WORD", help=only)
    parser.add_argument("--jobs", type=int, default=2, help="at a time (default: 2)")
    budget = "of tests for a break, as they take without one (default: 60)"
    parser.add_argument("--budget", type=float, default=60, metavar="SECONDS", help=budget)
    tests = "files of tests to run for each break, instead of those that the map names"
    parser.add_argument("--tests", nargs="+", default=[], metavar="FILE", help=tests)
    parser.add_argument("--again", action="store_true", help="run those again that survived before")
    arguments = parser.parse_args()
    texts, kept, known = sources(), WORK / f"{arguments.seed}{arguments.only.replace('/', '-')}.jsonl", equivalent()
    checkouts = [Checkout(WORK / str(number)) for number in range(arguments.jobs)]
    if arguments.map is not None or not (arguments.only or coverage.MAP.exists()):
        coverage.main(checkouts, arguments.map or ())
    if arguments.map is not None:
        return 0
    covered, found = Coverage.read(), read(kept, known)
    if arguments.again:
        found = {site: each for site, each in found.items() if each.outcome in ("equivalent", *NOTICED)}
    chosen = sample(texts, arguments.seed, arguments.count, arguments.only)
    free: SimpleQueue[Checkout] = SimpleQueue()
    for checkout in checkouts:
        free.put(checkout)

    def one(site: Site) -> None:
        checkout, began, text = free.get(), time.monotonic(), texts[site.file]
        try:
            old, new = changed_lines(text, site.changed(text))
            is_known = (site.file, old, new) in known
            tests = [arguments.tests] if arguments.tests else tests_of(site, text, covered, arguments.budget)
            ended, test = ("equivalent", "") if is_known else outcome(site, text, checkout, covered, tests)
        finally:
            free.put(checkout)
        found[site] = Broken(room_of(site.file), site, old, new, ended, round(time.monotonic() - began, 1), test)
        with kept.open("a") as file:
            file.write(json.dumps(found[site]._asdict()) + "\n")
        print(f"{ended:10} {found[site].seconds:5.1f} s  {site.file}:{site.line}  {site.kind}", flush=True)

    with ThreadPoolExecutor(len(checkouts)) as pool:
        list(pool.map(one, [site for site in chosen if site not in found]))
    return report([found[site] for site in chosen])


if __name__ == "__main__":
    sys.exit(main())
