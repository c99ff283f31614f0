"""Breaks are found by name, and are of every kind; what notices them is told from what fails without them."""

import json
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.conftest import ROOT
from tests.stress.mutants import choice, matrix
from tests.stress.mutants.__main__ import ALL, FIRST, breaks_of, outcome, table
from tests.stress.mutants.checkout import Checkout, is_compiled
from tests.stress.mutants.coverage import Coverage, digest
from tests.stress.mutants.matrix import Row
from tests.stress.mutants.names import EQUIVALENT, KNOWN, Index, parse, sources, words, write
from tests.stress.mutants.sites import Site, sites

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


def test_a_matrix_names_idle_many_and_lone_tests(tmp_path):
    many = [f"tests/a.py::test_many[{n}]" for n in range(matrix.MANY)]
    idle, alone = "tests/a.py::test_idle", "tests/b.py::test_alone"
    rows = [
        Row("f: {{1 => 2}}", "launch/a.py", 1, "noticed", 2.0, many, [idle, *many]),
        *(Row(f"g: {{{{{n} => 9}}}}", "launch/a.py", 2, "hung", 2.0, [alone], [idle, alone]) for n in range(1, 5)),
        Row("known", "launch/a.py", 3, "noticed", 0.1, [idle], []),  # only the first that noticed it is known
    ]
    path = tmp_path / "matrix.jsonl.xz"
    matrix.write_matrix(rows, path)
    assert list(matrix.read_matrix(path).values()) == rows
    said = matrix.report(rows, "tests/a").splitlines()
    assert said[0] == f"5 breaks, {matrix.MANY + 2} tests asked, {matrix.MANY + 1} notice one"
    assert "- tests/a.py: 1 of 11" in said
    assert "  - test_idle (asked 5 times)" in said
    assert f"- {matrix.MANY}: f: {{{{1 => 2}}}}" in said
    assert f"- {alone}: g: {{{{1 => 9}}}}" in matrix.report(rows, "")


def test_tests_of_a_line_are_those_that_ran_it():
    """After a change the lines of a map were other ones, and breaks counted as survived whose tests did not run."""

    def entry(seconds: float, code: int, **files: str) -> dict:
        return {"digest": "", "code": code, "seconds": seconds, "lines": {"README.md": [1, 2]}, "files": files}

    now = {"README.md": digest("README.md")}
    as_it_is, as_it_was, fails = "tests/test_files.py", "tests/test_errors.py", "tests/test_progress_line.py"
    tests = {
        as_it_is: entry(3, 0, **now),
        as_it_was: entry(2, 0, **{"README.md": "0"}),
        fails: entry(1, 1, **now),
        "tests/test_that_is_gone.py": entry(1, 0, **now),
    }
    covered = Coverage(tests)
    assert covered.covering("README.md", [2]) == [as_it_was, as_it_is]
    assert covered.covering("README.md", [3]) == [as_it_was]
    assert covered.covering("Makefile", [1]) == []
    assert covered.may_run("README.md") == [as_it_was, as_it_is]  # none has this digest
    assert covered.may_run("Makefile") == []


def test_an_unmapped_place_is_asked_of_tests_naming_it():
    """After files had been renamed, pytest failed on the old names, which counted as noticed."""
    site = Site("pipeline/progress_line.py", 1, "sign", 0, 1, "")
    earlier = ["tests/test_progress_line.py::test_that_is_gone", "tests/test_gone.py", "tests/test_files.py"]
    first, *others = choice.tests_of(site, "x = 1\n", Coverage({}), 60, earlier)
    assert first == ["tests/test_files.py"]
    assert "tests/test_progress_line.py" in others[0]


class Pretended(Checkout):
    """Without files and processes: of the file "tests" the first test always fails, the last two notice a break."""

    def __init__(self):
        self._passing, self._failing, self.is_broken, self.ended = set(), [], False, {}

    @contextmanager
    def changed(self, file, text):
        self.is_broken = True
        yield {"NUMBA_CACHE_DIR": "numba"}
        self.is_broken = False

    def environ(self, numba=None):
        return {}

    def run(self, tests, environ, seconds, options=("-x", "--all")):
        named = [test for test in OF_FILE if test.startswith(tuple(tests)) and test not in self._failing]
        self.ended = {}
        for test in named:
            fails = test == "tests::never" or (test.startswith("tests::notices") and self.is_broken)
            self.ended[test] = "failed" if fails else "passed"
            if fails and "-x" in options:
                break
        return 5 if not named else int("failed" in self.ended.values())

    def results(self):
        self._passing |= {test for test, how in self.ended.items() if how == "passed"}
        return self.ended


OF_FILE = ["tests::never", "tests::fine", "tests::notices", "tests::notices_too"]


@pytest.mark.parametrize(
    ("parts", "options", "ended", "noticed"),
    [
        ([["tests"]], FIRST, "noticed", OF_FILE[2:3]),
        ([["tests::never"], ["tests::fine"]], FIRST, "survived", []),
        ([["tests::never"], ["tests::notices"]], FIRST, "noticed", OF_FILE[2:3]),
        ([["tests"]], ALL, "noticed", OF_FILE[2:]),
        ([["tests::fine"]], ALL, "survived", []),
        ([], ALL, "uncovered", []),
    ],
)
def test_what_fails_without_a_break_does_not_notice_one(parts, options, ended, noticed, capsys):
    """A test that failed in the tool's forks alone noticed two breaks that it did not run."""
    site = next(iter(sites("a.py", PYTHON)))
    found = outcome(site, PYTHON, Pretended(), Coverage({}), parts, options)
    assert found[:2] == (ended, noticed)
    left_out = "left out from here on: tests::never" in capsys.readouterr().out
    assert left_out == any("tests::never".startswith(test) for part in parts for test in part)


JOB = """
import multiprocessing, os, signal, sys
from multiprocessing import forkserver
import numba

def look(pipe):
    pipe.send((os.getppid(), os.getcwd(), os.environ["WORD"], "deepspeed" in sys.modules))

def answer():
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=look, args=(theirs,))
    process.start()
    found = ours.recv()
    process.join()
    return found

def test_it():
    assert numba.config.CACHE_DIR == os.environ["NUMBA_CACHE_DIR"] == "kept"
    server, *others = answer()
    assert server == forkserver._forkserver._forkserver_pid
    assert others == [os.getcwd(), "said", True]
    assert answer()[0] == server
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    assert answer()[0] != server
"""


@pytest.mark.long
def test_the_fork_server_has_what_the_jobs_server_imported(tmp_path):
    (tmp_path / "test_job.py").write_text(JOB)
    (tmp_path / "pytest.ini").touch()
    words = [sys.executable, str(ROOT / "tests/stress/mutants/server.py")]
    environ = {"NUMBA_CACHE_DIR": "kept", "WORD": "said"}
    job = {"root": str(tmp_path), "words": ["-q", "test_job.py"], "environ": environ, "log": str(tmp_path / "log")}
    said = subprocess.run(words, input=json.dumps(job | {"seconds": 100}) + "\n", stdout=subprocess.PIPE, text=True)
    code, _ = json.loads(said.stdout)
    assert code == 0, (tmp_path / "log").read_text()


def changes(file: str, text: str) -> set[tuple[str, str]]:
    """Each line that a break changes, and what it becomes."""
    assert all(site.is_code(text) for site in sites(file, text))
    lines = [text.splitlines(), *(site.changed(text).splitlines() for site in sites(file, text))]
    pairs = [next(pair for pair in zip(lines[0], each, strict=True) if pair[0] != pair[1]) for each in lines[1:]]
    return {(old.strip(), new.strip()) for old, new in pairs}


@pytest.mark.parametrize(
    ("file", "compiled"),
    [
        ("pipeline/data/augment/registry.py", True),  # its numbers are constants of compiled code
        ("pipeline/ffcv/operations.py", True),
        ("pipeline/lock.py", False),
    ],
)
def test_what_numba_keeps_is_of_unbroken_code(file, compiled):
    assert is_compiled(file, ROOT) is compiled


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
