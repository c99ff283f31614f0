"""The first cases of `make stress WHAT=fuzz`."""

import subprocess

import pytest

from tests.stress.fuzz import MACHINES, build, run
from tests.stress.readers import READERS, faults


@pytest.mark.long
@pytest.mark.parametrize("machine", MACHINES, ids=["portable", "native"])
def test_damaged_jpegs_are_what_libjpeg_makes_of_them(machine, tmp_path, monkeypatch):
    try:
        program = build(tmp_path, machine)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs a C compiler with sanitizers ({error})")
    monkeypatch.chdir(tmp_path)
    assert run(program, 0, 0, 1500) == ""


def test_damaged_files_of_every_kind_are_read_or_refused():
    assert list(faults(0, range(len(READERS)))) == [""] * len(READERS)
