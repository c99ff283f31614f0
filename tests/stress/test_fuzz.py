"""The first cases of `make fuzz`."""

import subprocess

import pytest

from tests.stress.fuzz import MACHINES, build, run


@pytest.mark.long
@pytest.mark.parametrize("machine", MACHINES, ids=["portable", "native"])
def test_damaged_jpegs_are_what_libjpeg_makes_of_them(machine, tmp_path, monkeypatch):
    try:
        program = build(tmp_path, machine)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs a C compiler with sanitizers ({error})")
    monkeypatch.chdir(tmp_path)
    assert run(program, 0, 0, 1500) == ""
