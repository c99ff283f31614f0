"""`make test` leaves out what is marked, and only that."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

FILE = """
import pytest

@pytest.mark.long
def test_long(): pass

@pytest.mark.one_in(3)
@pytest.mark.parametrize("one", [1, 2])
@pytest.mark.parametrize("other", "abcd")
def test_cases(other, one): pass

@pytest.mark.parametrize("value", [1, pytest.param(2, marks=pytest.mark.long)])
def test_values(value): pass
"""
FIRST = ["test_cases[a-1]", "test_cases[b-2]", "test_cases[d-1]", "test_values[1]"]
CASES = [f"test_cases[{other}-{one}]" for other in "abcd" for one in (1, 2)]
VALUES = ["test_values[1]", "test_values[2]"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([""], FIRST),
        (["", "--all"], ["test_long", *CASES, *VALUES]),
        (["", "-k", "not values"], FIRST[:3]),
        (["::test_long"], ["test_long"]),
        (["::test_cases"], CASES),
        (["::test_cases[c-2]", "::test_values[2]"], ["test_cases[c-2]", "test_values[2]"]),
        (["::test_values"], VALUES),
    ],
)
def test_what_runs(words, expected, tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text(FILE)
    words = [word if word.startswith("-") or "not" in word else f"{file}{word}" for word in words]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.selection",
        "-p",
        "no:cacheprovider",
        "--co",
        "-q",
        *words,
    ]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line] == expected
