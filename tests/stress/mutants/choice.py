"""Which places are broken, and which test files are asked about each."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import ROOT
from tests.stress.mutants.coverage import Coverage
from tests.stress.mutants.sites import Site, sites

# Tests of these names, those first that notice most.
BLOCKS = ("batch_last", "reorder", "fuzz", "sanitized", "build", "registers")
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


def tests_of(site: Site, covered: Coverage, budget: float, earlier: Sequence[str]) -> list[list[str]]:
    """What is asked, in turns: tests that noticed it earlier, then the files that run its line.

    Those that name the module come first, and have `_MORE` times the budget of seconds; then those of its room, then
    the others, the quickest first. Of those that the map has not, the ones of the first two kinds. For C, which the
    map has not, those that are called as the file, or as its kind.
    """
    stem, room = Path(site.file).stem, f"tests/{room_of(site.file).removeprefix('pipeline/')}/"
    module = ".".join(["widemix", *Path(site.file.removeprefix("pipeline/")).with_suffix("").parts])
    is_python = site.file.endswith(".py")

    def rank(test: str) -> int:
        return 0 if stem in test or module in _text(test) else 1 if test.startswith(room) else 2

    if is_python:
        found = covered.covering(site.file, site.line)
        found += [test for test in (covered.unmeasured() if found else covered.passing()) if rank(test) < 2]
        found.sort(key=lambda test: (rank(test), covered.seconds(test)))
    else:
        names = BLOCKS if stem.startswith(_OF_BLOCKS) else IMAGES
        found = [test for name in (stem, *names) for test in covered.passing() if name in test]
    kept, spent = list[str](), 0.0
    for test in dict.fromkeys(found):
        most = budget * (1 if is_python and rank(test) else _MORE)
        if not kept or spent + covered.seconds(test) <= most:
            kept.append(test)
            spent += covered.seconds(test)
    return [part for part in ([test for test in earlier if _is_there(test)], kept) if part]


def _is_there(test: str) -> bool:
    """Whether a file has such a test."""
    file, _, name = test.partition("::")
    text, name = _text(file), name.partition("[")[0].rpartition("::")[2]
    return f"def {name}" in text if name else bool(text)


def _text(file: str) -> str:
    """That of a test file, as it is now; empty where it has gone, though a checkout of before may have it."""
    return (ROOT / file).read_text() if (ROOT / file).is_file() else ""
