"""Which places are broken, and which test files are asked about each."""

import ast
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import ROOT
from tests.stress.mutants.coverage import Coverage
from tests.stress.mutants.sites import Site, sites

# Tests of these names, those first that notice most.
BLOCKS = ("batch_last_by_c", "reorder", "fuzz", "sanitized", "build", "registers")
IMAGES = ("decode", "coefficients", "shrink", "restart", "data/augment", "checksum", "native/", "golden")
_MORE = 3  # times the budget for the test files that name the module
_OF_BLOCKS = ("mix", "products", "block", "reorder", "move", "lanes")  # files of C that begin so


def room_of(file: str) -> str:
    """The package that a file belongs to."""
    first, second, *rest = Path(file).parts
    return f"{first}/{second}" if first == "pipeline" and rest else first


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


def tests_of(site: Site, text: str, covered: Coverage, budget: float, earlier: Sequence[str]) -> list[list[str]]:
    """What is asked, in turns: tests that noticed it earlier, the files that run a place, and those that may by now.

    Those of its room come first, then the others, within a budget of seconds; those that name the module have
    `_MORE` times as many. Of those that the map has not, the ones of the room, and those that import the module. At
    last, with a budget of their own, those that have changed since the map was made and may run the place by now, of
    the room and by name. For C, which the map has not, those of its kind.
    """
    stem, room = Path(site.file).stem, f"tests/{room_of(site.file).removeprefix('pipeline/')}/"
    module = ".".join(["widemix", *Path(site.file.removeprefix("pipeline/")).with_suffix("").parts])

    first = [test for test in earlier if _is_there(test)]
    first_part = [first] if first else []

    def split(tests: list[str]) -> tuple[list[str], list[str], list[str]]:
        """Those that name the module, the other ones of its room, and all others."""
        named = [test for test in tests if stem in test or module in (ROOT / test).read_text()]
        own = [test for test in tests if test.startswith(room) and test not in named]
        return named, own, [test for test in tests if test not in (*named, *own)]

    if not site.file.endswith(".py"):
        names = BLOCKS if stem.startswith(_OF_BLOCKS) else IMAGES
        found = [test for name in (stem, *names) for test in covered.passing() if name in test]
        return [*first_part, _Within(covered, budget).take(list(dict.fromkeys(found)), _MORE)]
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
    return [*first_part, *(part for part in parts if part)] or [found[:1]] * bool(found)


def _is_there(test: str) -> bool:
    """Whether a file has such a test."""
    file, _, name = test.partition("::")
    name = name.partition("[")[0].rpartition("::")[2]
    return (ROOT / file).is_file() and f"def {name}" in (ROOT / file).read_text() if name else (ROOT / file).is_file()


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
