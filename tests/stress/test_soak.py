"""The short form of tests/stress/soak.py, in a process whose memory and children are its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_kills_and_other_worlds_change_no_image():
    command = [sys.executable, "-m", "tests.stress.soak", "--minutes", "0", "--groups", "5", "--seed", "1"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(random|paged): Counts\(kills=(\d+), steps=\d+, epochs=(\d+)", done.stdout, re.MULTILINE)
    assert [order for order, _, _ in found] == ["random", "paged"]
    assert all(int(kills) >= 5 and int(epochs) >= 2 for _, kills, epochs in found)
