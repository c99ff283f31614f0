"""On macOS and Windows every module imports, and networks and analyses work, by Python code alone."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

COMMANDS = ("cost digits/rp_mixer", "cost --named")


@pytest.mark.long
def test_all_modules_are_imported_and_commands_run(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.platforms", *COMMANDS],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("compiled code is for Linux alone") == 1, done.stderr
