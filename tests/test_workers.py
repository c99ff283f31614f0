"""Tests in several processes end as they do in one, and what becomes of those that crash or are interrupted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.conftest import ROOT

FILE = """
import os
import pytest

@pytest.fixture(scope="module")
def place(tmp_path_factory):
    yield tmp_path_factory.mktemp("place")
    with open("torn down", "a") as file:
        file.write(f"{os.path.basename(__file__)} {os.getpid()}\\n")

@pytest.fixture
def fails_at_end():
    yield
    raise ValueError("at the end")

@pytest.mark.parametrize("number", range(3))
def test_passes(number, place):
    assert not (place / str(number)).exists()
    (place / str(number)).touch()

def test_fails():
    print("said by Python")
    os.system("echo said by another")
    assert 1 == 2

def test_fails_at_end(place, fails_at_end): pass

def test_skipped(): pytest.skip("for this reason")

@pytest.mark.xfail(strict=True)
def test_fails_as_expected(): assert False
"""
CRASH = """
import os

def test_before(): pass
def test_crashes(): os.kill(os.getpid(), 9)
def test_after(): pass
def test_leaves(): os._exit(3)
"""
WAITS = """
import time

def test_waits(place):
    (place / "begun").touch()
    open("begun", "w")
    time.sleep(600)
"""


@pytest.fixture
def start(tmp_path):
    """`start(words...)` starts pytest on the files of tmp_path."""
    (tmp_path / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-p", "tests.workers", "-p", "no:cacheprovider", "--junitxml=it.xml"]
    started = []

    def run(*words: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [*command, *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DEBUG_TEMPROOT": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def outcomes(folder: Path) -> list[tuple[str, list[tuple[str, str | None, str | None]]]]:
    """Of each test what the report says: the element, its message and its text."""
    cases = ElementTree.parse(folder / "it.xml").iter("testcase")
    said = ((case.attrib["classname"], case.attrib["name"], case) for case in cases)
    return sorted(
        (f"{file}.{name}", [(part.tag, part.get("message"), part.text) for part in case]) for file, name, case in said
    )


def test_they_end_as_in_one_process_each_file_in_one(start, tmp_path):
    for name in ("one", "two", "three"):
        (tmp_path / f"test_{name}.py").write_text(FILE)
    ended = {}
    for workers in ("0", "2"):
        process = start("--workers", workers)
        said, _ = process.communicate(timeout=100)
        assert process.returncode == 1, said
        assert "3 failed, 12 passed, 3 skipped, 3 xfailed, 3 errors" in said
        ended[workers] = outcomes(tmp_path)
        torn_down = [line.split() for line in (tmp_path / "torn down").read_text().splitlines()]
        (tmp_path / "torn down").unlink()
        assert sorted(file for file, _ in torn_down) == ["test_one.py", "test_three.py", "test_two.py"]
        assert (str(process.pid) in {pid for _, pid in torn_down}) == (workers == "0")
    assert ended["2"] == ended["0"]
    ((_, message, _),) = dict(ended["2"])["test_one.test_fails"]
    assert message == "assert 1 == 2"
    assert said.count("said by Python\nsaid by another\n") == 3
    own, shared = ([*tmp_path.glob(f"pytest-of-*/pytest-{run}/**/place?")] for run in (0, 1))
    assert len(own) == len(shared) == 3
    assert len({place.parent for place in own}) == 1
    assert {place.parent.name for place in shared} == {pid for _, pid in torn_down}  # a folder for each worker
    assert not list(tmp_path.glob("pytest-of-*/*/.lock"))  # so that later runs remove them


def test_a_crash_is_a_failure_of_its_test_and_the_others_run(start, tmp_path):
    (tmp_path / "test_crash.py").write_text(CRASH)
    (tmp_path / "test_other.py").write_text("def test_it(): pass\n")
    process = start("--workers", "1")
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 1, said
    assert outcomes(tmp_path) == [
        ("test_crash.test_after", []),
        ("test_crash.test_before", []),
        ("test_crash.test_crashes", [("failure", "its process ended by signal 9", "its process ended by signal 9")]),
        ("test_crash.test_leaves", [("failure", "its process ended with 3", "its process ended with 3")]),
        ("test_other.test_it", []),
    ]


def test_a_first_failure_ends_all(start, tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text("".join(f"def test_{i}(): assert False\n" for i in range(99)))
    process = start("--workers", "2", "-x")
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 1, said
    assert "stopping after 1 failures" in said
    assert "1 failed in" in said


@pytest.mark.parametrize("to", ["all", "first"])
def test_ctrl_c_tears_fixtures_down(start, tmp_path, to):
    """As a terminal sends it, and to the process that was started alone."""
    (tmp_path / "test_waits.py").write_text(FILE.partition("@pytest.mark")[0] + WAITS)
    process = start("--workers", "2")
    deadline = time.monotonic() + 120
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (os.killpg if to == "all" else os.kill)(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 2, said
    assert "KeyboardInterrupt" in said
    assert (tmp_path / "torn down").exists()
