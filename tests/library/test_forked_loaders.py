"""A loader that was used before a fork gives its batches after it: no thread, lock or queue of the parent is used."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.clone import CLONE


@pytest.mark.long
def test_loaders_in_forked_processes(images: Path) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.library.forked_loaders", str(images)]
    done = subprocess.run(command, cwd=CLONE, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("done\n", "")
