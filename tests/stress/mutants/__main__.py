"""Breaks the code, one place at a time, and lists the breaks that no test notices.

    python -m tests.stress.mutants [--seed N] [--count N] [--only WORD] [--jobs N]
    python -m tests.stress.mutants --known [--only WORD] [--jobs N]

Without --known the places are sampled from the syntax trees, a room as often as its lines are many; with it they are
those of known.txt, of which each must be noticed. For each break the test that noticed it before runs first (it is in
matrix.jsonl.xz), then those that run its line, by the map of `tests.stress.mutants.coverage`, for as long as --budget
allows. Where there is no map it is made first; not so with --only, where the tests of the room and those that import
the module run. A break that makes them hang is noticed. Outcomes are kept in runs/mutants, from where the same
command goes on. equivalent.txt lists breaks that change nothing that a test could hold, each with the reason. Ends
with 1 where fewer than `LEAST` of the random ones are noticed, or not all of the known ones whose code is there.
"""

import argparse
import json
import os
import random
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from tests.stress.mutants import coverage
from tests.stress.mutants.checkout import Checkout, share
from tests.stress.mutants.choice import room_of, sample, tests_of
from tests.stress.mutants.coverage import NO_TESTS, WORK, Coverage
from tests.stress.mutants.matrix import MATRIX, NOTICED, Row, read_rows
from tests.stress.mutants.names import EQUIVALENT, KNOWN, Change, Index, parse, sources, write
from tests.stress.mutants.sites import Site
from widemix.cgroups import usable_cpus
from widemix.files import atomic_write

LEAST = 0.9
FIRST = ("-x", "--all")  # of pytest: until one test notices
ALL = ("--tb=no", "--continue-on-collection-errors")  # all that do


class Break(NamedTuple):
    """A named place; none where its code has gone, or is no longer one place."""

    name: str
    site: Site | None


def breaks_of(index: Index, changes: list[Change]) -> list[Break]:
    """Where changes can be made today."""
    found = [(change, index.find(change)) for change in changes]
    return [Break(str(change), sites[0] if len(sites) == 1 else None) for change, sites in found]


def outcome(
    site: Site, text: str, checkout: Checkout, covered: Coverage, parts: list[list[str]], options: tuple[str, ...]
) -> tuple[str, list[str], list[str]]:
    """Break a checkout, and run tests: how that ended, the tests that noticed, all that ran."""
    noticed, ran = list[str](), list[str]()
    for tests in parts:
        failing = [""]
        while failing and not noticed:  # with what fails without a break too left out
            code, ended = _broken(site, text, checkout, covered, tests, options)
            failing = [test for test, how in ended.items() if how != "passed"]
            ran += [test for test in ended if test not in ran]
            noticed = checkout.sound(failing)
            if options == ALL or code not in (0, 1, NO_TESTS):
                break
        if noticed or code not in (0, 1, NO_TESTS):
            return "hung" if code is None else "noticed", noticed or ["tests/conftest.py"], ran
    return "survived" if parts else "uncovered", [], ran


def _broken(
    site: Site, text: str, checkout: Checkout, covered: Coverage, tests: list[str], options: tuple[str, ...]
) -> tuple[int | None, dict[str, str]]:
    """Pytest's exit code with a break, and how each test ended."""
    with checkout.changed(site.file, site.changed(text)) as environ:
        slow = 120 if "numba" not in Path(environ["NUMBA_CACHE_DIR"]).name or site.file.endswith((".c", ".h")) else 0
        files = {test.partition("::")[0] for test in tests}
        seconds = (60 + slow + 3 * sum(map(covered.seconds, files))) * max(1, os.getloadavg()[0] / usable_cpus())
        return checkout.run(tests, environ, seconds, options), checkout.results()


def table(rows: list[Row]) -> str:
    """A row for each room: how many breaks, and how many of them were noticed."""
    lines = ["| room | breaks | noticed | |", "|---|---:|---:|---:|"]
    counted = [row for row in rows if row.outcome not in ("equivalent", "gone")]
    for room in [*sorted({room_of(row.file) for row in counted}), "all"]:
        own = [row for row in counted if room in (room_of(row.file), "all")]
        noticed = sum(row.outcome in NOTICED for row in own)
        lines.append(f"| {room} | {len(own)} | {noticed} | {100 * noticed / max(1, len(own)):.0f} % |")
    return "\n".join(lines)


def report(rows: list[Row], least: float) -> int:
    """Print the survivors and the table; returns the exit code."""
    for row in rows:
        if row.outcome in ("survived", "uncovered", "gone"):
            print(f"{row.outcome}: {row.name}  ({row.file}:{row.line})")
    print(table(rows))
    counted = [row.outcome in NOTICED for row in rows if row.outcome not in ("equivalent", "gone")]
    numbers = {name: sum(row.outcome == name for row in rows) for name in ("hung", "equivalent", "gone")}
    others = f"{numbers['hung']} of these by a time limit; {numbers['equivalent']} more are equivalent"
    print(f"{sum(counted)} of {len(counted)} noticed, {others}, and {numbers['gone']} gone from the code")
    return int(sum(counted) < least * len(counted))


class Run:
    """What is to be done with each break, and where its row is kept."""

    def __init__(self, arguments: argparse.Namespace, index: Index, kept: Path):
        self._arguments, self._index, self._kept = arguments, index, kept
        self._covered, self._before = Coverage.read(), read_rows(MATRIX)
        self._options = ALL if arguments.matrix else FIRST
        self._equivalent: dict[str, set[tuple[str, ...]]] = defaultdict(set)
        for change in parse(EQUIVALENT.read_text()):
            for site in index.find(change):
                self._equivalent[site.file].add(index.result(site))

    def one(self, each: Break, checkout: Checkout) -> None:
        """Try a break, and keep its row."""
        began, site = time.monotonic(), each.site
        ended, noticed, ran = self._outcome(each, checkout) if site else ("gone", [], [])
        place = (site.file, site.line) if site else ("", 0)
        row = Row(each.name, *place, ended, round(time.monotonic() - began, 1), noticed, ran)
        if self._options == FIRST:
            row = row._replace(ran=[])
        with self._kept.open("a") as file:
            file.write(json.dumps(row._asdict()) + "\n")
        print(f"{ended:10} {row.seconds:5.1f} s  {len(noticed):3}  {place[0]}:{place[1]}  {each.name}", flush=True)

    def _outcome(self, each: Break, checkout: Checkout) -> tuple[str, list[str], list[str]]:
        site, arguments = each.site, self._arguments
        assert site is not None
        if site.file in self._equivalent and self._index.result(site) in self._equivalent[site.file]:
            return "equivalent", [], []
        text = self._index.texts[site.file]
        before = self._before[each.name].noticed if each.name in self._before else []
        parts = [arguments.tests] if arguments.tests else tests_of(site, self._covered, arguments.budget, before)
        if self._options == ALL:
            files = (test.partition("::")[0] for part in parts for test in part)
            parts = [list(dict.fromkeys(files))] if parts else []
        return outcome(site, text, checkout, self._covered, parts, self._options)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--known", action="store_true", help="the breaks of known.txt, instead of random ones")
    matrix = "all tests that notice, instead of the first: see tests.stress.mutants.matrix"
    parser.add_argument("--matrix", action="store_true", help=matrix)
    parser.add_argument("--seed", type=int, default=0, help="another seed breaks other places (default: 0)")
    parser.add_argument("--count", type=int, help="how many (default: 300; all of the known ones)")
    only = "in files whose path contains it; of the known breaks also those whose title or function does"
    parser.add_argument("--only", default="", metavar="WORD", help=only)
    only = "only bring the map up to date, for test files whose path contains a word if there is one"
    parser.add_argument("--map", nargs="*", metavar="WORD", help=only)
    parser.add_argument("--jobs", type=int, default=2, help="at a time (default: 2)")
    budget = "of tests for a break, as they take without one (default: 60)"
    parser.add_argument("--budget", type=float, default=60, metavar="SECONDS", help=budget)
    tests = "files of tests to run for each break, instead of those that the map names"
    parser.add_argument("--tests", nargs="+", default=[], metavar="FILE", help=tests)
    again = "run those again that survived before; with --matrix all that it has, noticed or not"
    parser.add_argument("--again", action="store_true", help=again)
    return parser.parse_args()


def chosen(arguments: argparse.Namespace, index: Index) -> tuple[Path, list[Break]]:
    """The breaks, and the file of their rows."""
    if arguments.known:
        changes = parse(KNOWN.read_text())
        pairs = zip(changes, breaks_of(index, changes), strict=True)
        named = [each for change, each in pairs if arguments.only in f"{change.title} {each.name} {each.site}"]
        count = min(len(named), arguments.count or len(named))
        numbers = random.Random(arguments.seed).sample(range(len(named)), count)
        return WORK / "known.jsonl", [named[number] for number in sorted(numbers)]
    if arguments.matrix and arguments.again:
        rows = [row for row in read_rows(MATRIX).values() if row.ran and arguments.only in row.file]
        lines = [row.name.partition(": ") for row in rows]
        changes = [change for scope, _, code in lines for change in parse(f"{scope}\n    again: {code}\n")]
        return WORK / "again.jsonl", breaks_of(index, changes)
    name, count = f"{arguments.seed}{arguments.only.replace('/', '-')}", arguments.count or 300
    if not arguments.matrix:
        sites = sample(index.texts, arguments.seed, count, arguments.only)
        return WORK / f"{name}.jsonl", [Break(str(index.name(site)), site) for site in sites]
    plan = WORK / f"matrix-{name}-{count}.txt"  # since the code may change before all are done
    if not plan.exists():
        sites = sample(index.texts, arguments.seed, count, arguments.only)
        atomic_write(plan, "".join(write([index.name(site)._replace(title=site.kind)]) for site in sites))
    return WORK / "matrix.jsonl", breaks_of(index, parse(plan.read_text()))


def main() -> int:
    arguments = parse_arguments()
    mode = "again-" if arguments.again else "matrix-" if arguments.matrix else "known-" if arguments.known else ""
    checkouts = [Checkout(WORK / f"{mode}{number}") for number in range(arguments.jobs)]
    if arguments.map is not None or not (arguments.only or coverage.MAP.exists()):
        coverage.main(checkouts, arguments.map or ())
    if arguments.map is not None:
        return 0
    index = Index(sources())
    kept, breaks = chosen(arguments, index)
    found = read_rows(kept)
    if arguments.again and not arguments.matrix:
        found = {name: row for name, row in found.items() if row.outcome in ("equivalent", *NOTICED)}
    elif (arguments.known or arguments.again) and all(each.name in found for each in breaks):
        found = {}  # all were done
    run = Run(arguments, index, kept)
    share(checkouts, [each for each in breaks if each.name not in found], run.one)
    rows = read_rows(kept)
    if arguments.matrix:
        before = read_rows(MATRIX)
        for each in breaks:
            if each.name in before and before[each.name].outcome in NOTICED and rows[each.name].outcome == "survived":
                print(f"noticed before, not now: {each.name}  ({before[each.name].noticed[:1]})")
    return report([rows[each.name] for each in breaks], 1.0 if arguments.known else LEAST)


if __name__ == "__main__":
    sys.exit(main())
