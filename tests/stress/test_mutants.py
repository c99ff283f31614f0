"""The known mutations are of code that is there, and name tests that exist; the random ones are of every kind."""

import json
import shlex
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.conftest import ROOT
from tests.stress.mutants.__main__ import Broken, changed_lines, equivalent, outcome, sample, sources, table
from tests.stress.mutants.checkout import Checkout, is_compiled
from tests.stress.mutants.coverage import Coverage, digest
from tests.stress.mutants.mutations import EQUIVALENT, mutated, read_mutations
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


def test_all_known_mutations_change_their_file_and_name_tests():
    """Where you have changed a line of theirs, change `old` and `new` of tests/stress/mutants/*.yaml with it."""
    mutations, refused = read_mutations(), []
    assert len({(mutation.file, mutation.title) for mutation in mutations}) == len(mutations)
    for mutation in mutations:
        text = (ROOT / mutation.file).read_text()
        try:
            assert mutated(text, mutation) != text
        except ValueError as error:
            refused.append(str(error))
        files = [word for word in shlex.split(mutation.tests) if word.startswith("tests/")]
        assert files
        assert all((ROOT / name).is_file() for name in files)
    assert refused == []


def test_a_mutation_of_code_that_has_changed_is_refused():
    mutation = read_mutations()[0]
    for text in ("", 2 * mutation.old):
        with pytest.raises(ValueError, match="times, not once"):
            mutated(text, mutation)


def test_tests_of_a_line_are_those_that_ran_it_or_any_of_its_file_where_that_has_changed_since():
    """After a change the lines of a map were other ones, and breaks counted as survived whose tests did not run."""

    def entry(seconds: float, code: int, **files: str) -> dict:
        return {"digest": "", "code": code, "seconds": seconds, "lines": {"README.md": [1, 2]}, "files": files}

    now = {"README.md": digest("README.md")}
    tests = {
        "as it is": entry(3, 0, **now),
        "as it was": entry(2, 0, **{"README.md": "0"}),
        "fails": entry(1, 1, **now),
    }
    covered = Coverage(tests)
    assert covered.covering("README.md", [2]) == ["as it was", "as it is"]
    assert covered.covering("README.md", [3]) == ["as it was"]
    assert covered.covering("Makefile", [1]) == []
    assert covered.may_run("README.md") == ["as it was", "as it is"]  # of no test is there a file of this digest
    assert covered.may_run("Makefile") == []


class Pretended(Checkout):
    """Without files and processes: of the file "tests" the first test always fails, the last one notices a break."""

    def __init__(self):
        self._passing, self._failing, self.is_broken, self.log = set(), [], False, ""

    @contextmanager
    def changed(self, file, text):
        self.is_broken = True
        yield {"NUMBA_CACHE_DIR": "numba"}
        self.is_broken = False

    def environ(self, numba=None):
        return {}

    def run(self, tests, environ, seconds):
        of_file = ["tests::never", "tests::fine", "tests::notices"]
        named = [test for test in of_file if test.startswith(tuple(tests)) and test not in self._failing]
        failing = [test for test in named if test == "tests::never" or (test == "tests::notices" and self.is_broken)]
        self.log = failing[0] if failing else ""
        return 5 if not named else int(bool(failing))

    def failed(self):
        return self.log


@pytest.mark.parametrize(
    ("parts", "ended"),
    [
        ([["tests"]], ("noticed", "tests::notices")),
        ([["tests::never"], ["tests::fine"]], ("survived", "")),
        ([["tests::never"], ["tests::notices"]], ("noticed", "tests::notices")),
    ],
)
def test_what_fails_without_a_break_does_not_notice_one(parts, ended, capsys):
    """A test that failed in the tool's forks alone noticed two breaks that it did not run."""
    site = next(iter(sites("a.py", PYTHON)))
    assert outcome(site, PYTHON, Pretended(), Coverage({}), parts) == ended
    assert "left out from here on: tests::never" in capsys.readouterr().out


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
def test_a_fork_server_of_the_tests_has_what_the_server_of_jobs_has_imported(tmp_path):
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
    return {changed_lines(text, site.changed(text)) for site in sites(file, text)}


@pytest.mark.parametrize(
    ("file", "compiled"),
    [
        ("pipeline/data/augment/registry.py", True),  # its numbers are constants of compiled code
        ("pipeline/ffcv/decoding.py", True),
        ("pipeline/run/lock.py", False),
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


def test_a_seed_names_the_same_breaks_and_more_of_them_begin_with_the_same():
    texts = {"pipeline/a/b.py": PYTHON, "pipeline/c.py": PYTHON, "launch/d.py": 9 * PYTHON}
    found = sample(texts, 3, 20, "")
    assert sample(texts, 3, 7, "") == found[:7]
    assert sample(texts, 4, 7, "") != found[:7]
    assert len(set(found)) == 20
    assert {site.file for site in sample(texts, 3, 5, "pipeline/c")} == {"pipeline/c.py"}
    rows = table([Broken("launch", site, "", "", "noticed" if site.line % 2 else "survived", 1.0) for site in found])
    odd = sum(site.line % 2 for site in found)
    assert rows.splitlines()[-1] == f"| all | 20 | {odd} | {5 * odd} % |"


def test_equivalent_breaks_are_of_lines_that_are_there():
    texts = sources()
    for file, old, new in equivalent():
        lines = [line.strip() for line in texts[file].splitlines()]
        assert set(old.splitlines()) <= set(lines), f"{EQUIVALENT}: {file}: {old}"
        assert old != new
