"""Breaks are found by name, and are of every kind."""

import pytest

from tests.stress.mutants import choice
from tests.stress.mutants.__main__ import breaks_of, table
from tests.stress.mutants.matrix import Row
from tests.stress.mutants.names import EQUIVALENT, KNOWN, Index, parse, sources, words, write
from tests.stress.mutants.sites import sites

PYTHON = """
def f(x: int = 3) -> bool:
    total = g(x, 2.5, key=-x)
    if not x:
        return None
    return x < total and total in (True, f"{x + 1}")
"""
C = """
#define TWO 2
static int f(int x) { /* x + 1 */
    x = x + 3;
    return x <= 2 && x;
}
"""


def test_breaks_that_are_kept_can_still_be_made():
    """A refactoring may lose one in ten, which `--known` lists as gone: mend their names, or drop them."""
    index = Index(sources())
    for path in (KNOWN, EQUIVALENT):
        changes = parse(path.read_text())
        assert len({str(change) for change in changes}) == len(changes)
        assert write(changes) == path.read_text()
        gone = [each.name for each in breaks_of(index, changes) if each.site is None]
        assert len(gone) <= len(changes) / 10, "\n".join(gone)


MOVED = "def h(): ...\n\n" + PYTHON.replace("g(x, 2.5,", "g(\n        x,  # first\n        2.5,\n       ")


@pytest.mark.parametrize(
    ("code", "texts", "changed"),
    [
        ("f: x < {{total => 0}}", {"pipeline/a.py": PYTHON}, "x < 0 and"),
        ("a.f: if {{not => }} x:", {"pipeline/a.py": PYTHON}, "if  x:"),
        ("a.f: g({{x, => }} 2.5", {"launch/other/b.py": MOVED}, "g(\n          # first\n        2.5,"),  # elsewhere
        ("a: {{int => str}}", {"pipeline/a.py": PYTHON}, "x: str"),
        ("b.f: {{x => 0}} #4", {"pipeline/b.py": PYTHON, "pipeline/a.py": PYTHON}, "if not 0"),
        ("g: {{x => y}}", {"pipeline/a.py": PYTHON}, None),
        ("f: {{3 => 4}}", {"pipeline/a.py": PYTHON, "pipeline/b.py": PYTHON}, None),  # which of two?
        ("a.c: x = x + {{3 => 4}};", {"pipeline/native/a.c": C}, "x = x + 4;"),
    ],
)
def test_a_break_is_found_by_its_function_wherever_that_is(code, texts, changed):
    scope, _, change = code.partition(": ")
    index = Index(texts)
    [found] = breaks_of(index, parse(f"{scope}\n    why: {change}\n"))
    if changed is None:
        assert found.site is None
    else:
        text = found.site.changed(texts[found.site.file])
        assert changed in text
        assert sum(one != other for one, other in zip(text, texts[found.site.file], strict=False))


def test_each_random_break_is_found_by_its_name():
    texts = {"pipeline/a.py": PYTHON, "pipeline/b/a.py": PYTHON, "pipeline/native/a.c": C}
    index = Index(texts)
    for file, text in texts.items():
        for site in sites(file, text):
            [change] = parse(write([index.name(site)._replace(title="why")]))
            [found] = index.find(change)
            assert words(found.changed(text), file) == words(site.changed(text), file)


def changes(file: str, text: str) -> set[tuple[str, str]]:
    """Each line that a break changes, and what it becomes."""
    assert all(site.is_code(text) for site in sites(file, text))
    lines = [text.splitlines(), *(site.changed(text).splitlines() for site in sites(file, text))]
    pairs = [next(pair for pair in zip(lines[0], each, strict=True) if pair[0] != pair[1]) for each in lines[1:]]
    return {(old.strip(), new.strip()) for old, new in pairs}


def test_every_kind_of_break_is_offered_and_no_other():
    call, ends = "total = g(x, 2.5, key=-x)", 'return x < total and total in (True, f"{x + 1}")'
    assert changes("a.py", PYTHON) == {
        ("def f(x: int = 3) -> bool:", "def f(x: int = 4) -> bool:"),
        ("def f(x: int = 3) -> bool:", "def f(x: int = 2) -> bool:"),
        (call, "pass"),
        (call, "total = g(2.5, x, key=-x)"),
        (call, "total = g(x, 5.0, key=-x)"),
        (call, "total = g(x, 2.5, key=x)"),
        (call, "total = g(x, 2.5)"),
        ("if not x:", "if x:"),
        ("if not x:", "if not (not x):"),
        (ends, ends.replace("<", "<=")),
        (ends, ends.replace("and", "or")),
        (ends, ends.replace("in", "not in")),
        (ends, ends.replace("True", "False")),
        (ends, f"return not ({ends.removeprefix('return ')})"),
    }
    assert changes("a.c", C) == {
        ("x = x + 3;", "x = x - 3;"),
        ("x = x + 3;", "x = x + 4;"),
        ("x = x + 3;", ""),
        ("return x <= 2 && x;", "return x < 2 && x;"),
        ("return x <= 2 && x;", "return x <= 3 && x;"),
        ("return x <= 2 && x;", "return x <= 2 || x;"),
    }


def test_a_seed_names_the_same_breaks():
    texts = {"pipeline/a/b.py": PYTHON, "pipeline/c.py": PYTHON, "launch/d.py": 9 * PYTHON}
    found = choice.sample(texts, 3, 20, "")
    assert choice.sample(texts, 3, 7, "") == found[:7]
    assert choice.sample(texts, 4, 7, "") != found[:7]
    assert len(set(found)) == 20
    assert {site.file for site in choice.sample(texts, 3, 5, "pipeline/c")} == {"pipeline/c.py"}
    ended = ["noticed" if site.line % 2 else "survived" for site in found]
    rows = table([Row("", site.file, site.line, how, 1.0, [], []) for site, how in zip(found, ended, strict=True)])
    odd = sum(site.line % 2 for site in found)
    assert rows.splitlines()[-1] == f"| all | 20 | {odd} | {5 * odd} % |"
