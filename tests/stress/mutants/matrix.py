"""Which tests notice which breaks: `python -m tests.stress.mutants.matrix [WORD]` prints what it says of a folder.

    python -m tests.stress.mutants --matrix [--seed N] [--count N] [--budget SECONDS] [--only WORD]

asks for each break all tests that the map of lines names, within the budget, and does not stop at the first that
notices; what `make test` leaves out is not asked. It goes on where it was interrupted. `--pack` takes what has been
measured since into matrix.jsonl.xz, from which `--matrix --again` breaks the same places once more, by name, and
lists those that were noticed before and are not any more.
"""

import argparse
import json
import lzma
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.stress.mutants.coverage import WORK
from widemix.files import atomic_write

MATRIX = Path(__file__).with_name("matrix.jsonl.xz")
MEASURED = [WORK / f"{name}.jsonl" for name in ("known", "matrix", "again")]
NOTICED = ("noticed", "hung")
MANY = 10  # tests that notice one break, where fewer would do
ENOUGH = 5  # breaks that a test must have been asked about before it is said to hold nothing


class Row(NamedTuple):
    """A break: `outcome` is noticed or hung, survived or uncovered (no test runs it), equivalent, or gone."""

    name: str
    file: str
    line: int
    outcome: str
    seconds: float
    noticed: list[str]  # tests; the first alone unless `ran` is known
    ran: list[str]  # all tests that were asked


def read_rows(path: Path) -> dict[str, Row]:
    """The rows of a file by name, the last of each; none where there is no file."""
    data = path.read_bytes() if path.exists() else b""
    text = lzma.decompress(data) if path.suffix == ".xz" and data else data
    return {row.name: row for row in (Row(**json.loads(line)) for line in text.decode().splitlines())}


def write_matrix(rows: Iterable[Row]) -> None:
    """Keep rows, those of one name and place together."""
    lines = "".join(f"{json.dumps(row._asdict())}\n" for row in sorted(rows))
    atomic_write(MATRIX, lzma.compress(lines.encode(), preset=9))


def report(rows: Iterable[Row], word: str) -> str:
    """Tests on which nothing rests, breaks that many notice, and places that one test alone holds, as Markdown."""
    rows = [row for row in rows if row.ran]
    asked = Counter(test for row in rows for test in row.ran)
    notices = Counter(test for row in rows for test in row.noticed)
    idle: dict[str, list[str]] = defaultdict(list)
    for test in asked:
        if not notices[test] and asked[test] >= ENOUGH and word in test:
            idle[test.partition("::")[0]].append(test)
    total = Counter(test.partition("::")[0] for test in asked)
    own = [row for row in rows if word in row.file or any(word in test for test in row.noticed)]
    many = sorted((row for row in own if len(row.noticed) >= MANY), key=lambda row: -len(row.noticed))
    alone = sorted(row for row in own if len(row.noticed) == 1 and row.outcome in NOTICED)
    lines = [
        f"{len(rows)} breaks, {len(asked)} tests asked, {len(notices)} notice one",
        "",
        "## Nothing rests on",
        "",
    ]
    for file, tests in sorted(idle.items(), key=lambda item: -len(item[1])):
        lines.append(f"- {file}: {len(tests)} of {total[file]}")
        lines += [
            f"  - {test.partition('::')[2]} (asked {asked[test]} times)" for test in tests if word and word in file
        ]
    lines += ["", f"## {MANY} tests or more notice", ""]
    lines += [f"- {len(row.noticed)}: {row.name}" for row in many]
    lines += ["", "## One test alone notices", ""]
    lines += [f"- {row.noticed[0]}: {row.name}" for row in alone]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="", help="of paths of tests or of code; names tests one by one")
    parser.add_argument("--pack", action="store_true", help="take what has been measured since into the kept file")
    arguments = parser.parse_args()
    rows = read_rows(MATRIX)
    if arguments.pack:
        for path in MEASURED:
            rows |= {name: row for name, row in read_rows(path).items() if row.noticed or row.ran}
        write_matrix(rows.values())
    print(report(rows.values(), arguments.word))


if __name__ == "__main__":
    main()
