"""Breaks by name: a function, what stands there, and what would stand there instead.

known.txt and equivalent.txt hold one a line, below the function that it is in:

    schedule.build_schedule
        decay ends a step late: epochs * steps_per_epoch{{ - 1 => }}
        every epoch is the first: key(self.seed, {{epoch => 0}}, self.count, ORDER)

Code is compared by its tokens, so that it may be moved, wrapped and commented. A function is found by its name
wherever it is; leading parts (module, class) only tell several of one name apart. A module's own lines are below its
name, those of C below the file's. `#2` at the end is the second such place of the function.
"""

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.conftest import ROOT
from tests.stress.mutants.sites import Site, line_starts, span

KNOWN, EQUIVALENT = (Path(__file__).with_name(f"{name}.txt") for name in ("known", "equivalent"))
ROOMS = ("pipeline", "data_prep", "launch")
_STRING = r"""(?<!\w)[rbfuRBFU]{0,2}(?:\'{3}.*?\'{3}|"{3}.*?"{3}|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")"""
_REST = r"\w+|[<>=!]=|//|\*\*|<<|>>|&&|\|\||[^\w\s]"
_PYTHON = re.compile(rf"(?P<comment>\#[^\n]*|\\\n|;)|{_STRING}|{_REST}", re.S)
_C = re.compile(rf"(?P<comment>/\*.*?\*/|//[^\n]*)|{_STRING}|{_REST}", re.S)
_CHANGE = re.compile(r"(.*?)\{\{(.*?) => (.*?)\}\}(?!\})(.*?)(?: #(\d+))?")
_WRAPPER = textwrap.TextWrapper(118, "    ", 8 * " ", break_long_words=False, break_on_hyphens=False)
_FEWEST, _MOST = 3, 14  # tokens of a name beside what changes


class Change(NamedTuple):
    """`old` between `before` and `after` becomes `new`, below a title: what is wrong then, or why nothing is."""

    title: str
    scope: str
    before: str
    old: str
    new: str
    after: str
    number: int = 0  # of several places, from 1; 0 where there is one

    def __str__(self) -> str:
        return f"{self.scope}: {self.code}"

    @property
    def code(self) -> str:
        number = f" #{self.number}" if self.number else ""
        return f"{self.before}{{{{{self.old} => {self.new}}}}}{self.after}{number}"


class Place(NamedTuple):
    """A module, class or function: the bytes from `start` to `stop` of a file."""

    parts: tuple[str, ...]  # of its name, from the room on
    file: str
    start: int
    stop: int


def tokens(text: str, file: str) -> list[tuple[str, int, int]]:
    """Those of a file's text, without comments and last commas of lists, each with its first and last byte."""
    found: list[tuple[str, int, int]] = []
    for match in (_PYTHON if file.endswith(".py") else _C).finditer(text.encode().decode("latin-1")):
        if not match["comment"]:
            if match[0] in ")]}" and found and found[-1][0] == ",":
                found.pop()
            found.append((match[0], *match.span()))
    return found


def words(text: str, file: str) -> list[str]:
    """The tokens alone."""
    return [token for token, _, _ in tokens(text, file)]


def sources() -> dict[str, str]:
    """The text of every file that can be broken, by path."""
    files = (path for room in ROOMS for kind in ("*.py", "*.c", "*.h") for path in (ROOT / room).rglob(kind))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(files) if path.is_file()}


def parse(text: str) -> list[Change]:
    """The changes of a file such as known.txt."""
    found, scope = [], ""
    for line in re.sub(r"\n {8,}", " ", text).splitlines():
        if line.startswith("    "):
            title, _, change = line.strip().partition(": ")
            *code, number = _CHANGE.fullmatch(change).groups()  # type: ignore[union-attr]
            found.append(Change(title, scope, *code, int(number or 0)))
        elif line and not line.startswith("#"):
            scope = line
    return found


def write(changes: Iterable[Change]) -> str:
    """What `parse` reads."""
    by_scope: dict[str, list[str]] = defaultdict(list)
    for change in changes:
        line = f"{change.title}: {change.code}"
        by_scope[change.scope].append("\n".join(_WRAPPER.wrap(line)))
    return "".join("\n".join([scope, *rows, ""]) for scope, rows in sorted(by_scope.items()))


class Index:
    """All places of the code, by name."""

    def __init__(self, texts: dict[str, str]):
        self.texts = texts
        self._tokens: dict[str, list[tuple[str, int, int]]] = {}
        self._by_name: dict[str, list[Place]] = defaultdict(list)
        self._of_file: dict[str, list[Place]] = defaultdict(list)
        for file, text in texts.items():
            for place in _places(file, text):
                self._by_name[place.parts[-1]].append(place)
                self._of_file[file].append(place)

    def find(self, change: Change) -> list[Site]:
        """Where a change can be made: nowhere if its code has gone; several places are one too few parts."""
        parts = _parts(change.scope)
        for first in range(len(parts)):
            found = {site for place in self._named(parts[first:]) for site in self._within(place, change)}
            if found:
                ordered = sorted(found)
                return ordered[change.number - 1 : change.number] if change.number else ordered
        return []

    def name(self, site: Site) -> Change:
        """The name of a break, which `find` finds again."""
        own = [place for place in self._of_file[site.file] if place.start <= site.start and site.stop <= place.stop]
        place = min(own, key=lambda each: each.stop - each.start)
        parts = place.parts[-2:]
        while len(self._named(parts)) > 1 and parts != place.parts:
            parts = place.parts[-len(parts) - 1 :]
        numbered = []
        for start, stop in _around(site, self.texts[site.file]):
            change = self._change(".".join(parts), site, max(start, place.start), min(stop, place.stop))
            found = self.find(change)
            same = [number for number, each in enumerate(found, 1) if self._is_same(each, site)]
            if same and len(found) == 1:
                return change
            numbered += [change._replace(number=number) for number in same]
        return numbered[0]

    def result(self, site: Site) -> tuple[str, ...]:
        """What a file reads like after a break: equal for equal breaks, however they are written."""
        return (site.file, *words(site.changed(self.texts[site.file]), site.file))

    def _is_same(self, one: Site, other: Site) -> bool:
        return (one.file, *one[3:]) == (other.file, *other[3:]) or self.result(one) == self.result(other)

    def _named(self, parts: tuple[str, ...]) -> list[Place]:
        return [place for place in self._by_name[parts[-1]] if place.parts[-len(parts) :] == parts]

    def _within(self, place: Place, change: Change) -> Iterator[Site]:
        text, wanted = self.texts[place.file], _run(change, place.file)
        if place.file not in self._tokens:
            self._tokens[place.file] = tokens(text, place.file)
        own = [token for token in self._tokens[place.file] if place.start <= token[1] < place.stop]
        first = len(words(change.before, place.file))
        last = len(wanted) - len(words(change.after, place.file))
        for at in range(len(own) - len(wanted) + 1 if wanted else 0):
            if own[at][0] == wanted[0] and [token for token, _, _ in own[at : at + len(wanted)]] == wanted:
                start = own[at + first][1] if first < len(wanted) else own[at + first - 1][2]
                stop = own[at + last - 1][2] if last > first else start
                line = text.encode().count(b"\n", 0, start) + 1
                yield Site(place.file, line, "named", start, stop, change.new + " " * (last == first))

    def _change(self, scope: str, site: Site, start: int, stop: int) -> Change:
        data = self.texts[site.file].encode()
        parts = (data[start : site.start], data[site.start : site.stop], site.new.encode(), data[site.stop : stop])
        return Change("", scope, *(_one_line(part, site.file) for part in parts))


def _run(change: Change, file: str) -> list[str]:
    """The tokens by which a change is found."""
    return words(" ".join((change.before, change.old, change.after)), file)


def _parts(scope: str) -> tuple[str, ...]:
    return (scope,) if scope.endswith((".c", ".h")) else tuple(scope.split("."))


def _places(file: str, text: str) -> Iterator[Place]:
    """A file, and what it defines."""
    size = len(text.encode())
    if not file.endswith(".py"):
        yield Place((file.rpartition("/")[2],), file, 0, size)
        return
    module = tuple(part for part in Path(file).with_suffix("").parts if part not in ("pipeline", "__init__"))
    yield Place(module or ("widemix",), file, 0, size)
    starts = line_starts(text)

    def inside(node: ast.AST, parts: tuple[str, ...]) -> Iterator[Place]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                own = (*parts, child.name)
                first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                yield Place(own, file, starts[first - 1], span(child, starts)[1])
                yield from inside(child, own)
            else:
                yield from inside(child, parts)

    yield from inside(ast.parse(text), module)


def _around(site: Site, text: str) -> list[tuple[int, int]]:
    """From the first byte to the last of what a site is part of, of a few tokens, then of more."""
    own = tokens(text, site.file)
    before = [start for _, start, _ in own if start <= site.start]
    after = [stop for _, _, stop in own if stop >= site.stop]
    return [(before[-1 - n // 2 :][0], after[: 1 + (n + 1) // 2][-1]) for n in (*range(_FEWEST, _MOST), 0)]


def _one_line(data: bytes, file: str) -> str:
    """Code without line ends and comments."""
    text = data.decode()
    pattern = _PYTHON if file.endswith(".py") else _C
    text = pattern.sub(lambda match: "" if match["comment"] and match[0] != ";" else match[0], text)
    return re.sub(r"\s*\n\s*", " ", text)
