"""The test files that take longest, with which `make test` begins, so that none is left to one process at the end.

pytest-xdist would begin with those of most tests. Each of its processes takes 6 s of CPU time to collect all tests,
which forks of one process would share: that is 10 s of `make test` on two cores.
`python -m tests.longest JUNIT.xml` writes longest.txt anew, from `make test ARGS=--junitxml=JUNIT.xml`.
"""

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
_FILE = Path(__file__).with_suffix(".txt")
_LEAST = 5  # seconds


def longest() -> dict[str, int]:
    """The files' seconds by their paths from the project's root, the longest first."""
    lines = (line.split() for line in _FILE.read_text().splitlines())
    return {path: int(seconds) for seconds, path in lines}


def measured(report: Path) -> dict[str, int]:
    """The same, as a report of pytest says."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        if not case.attrib["classname"]:  # a file that is skipped whole
            continue
        path = Path(*case.attrib["classname"].split("."))
        while not (ROOT / path.with_suffix(".py")).is_file():  # a test's class
            path = path.parent
        seconds[path.with_suffix(".py").as_posix()] += float(case.attrib["time"])
    return {path: round(number) for path, number in seconds.most_common() if number >= _LEAST}


if __name__ == "__main__":
    _FILE.write_text("".join(f"{seconds} {path}\n" for path, seconds in measured(Path(sys.argv[1])).items()))
