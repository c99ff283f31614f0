"""Weights & Biases is imported when it is used, not because timm is."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from tests.conftest import ROOT

pytest.importorskip("wandb")
KILLED = """
import os, signal, sys
import widemix.bench, widemix.trainer, widemix.analysis, widemix
import timm.optim, timm.utils
assert "wandb" not in sys.modules
os.kill(os.getpid(), signal.SIGKILL)
"""
USED = """
import widemix.models, timm, timm.utils.summary
print(timm.utils.summary.wandb.__version__)
import wandb
print(wandb.__version__)
"""


def run(code: str, folder) -> subprocess.CompletedProcess:
    environ = os.environ | {"TMPDIR": str(folder), "NUMBA_CACHE_DIR": str(folder / "numba")}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)


def test_a_killed_process_that_used_timm_leaves_nothing_of_it(tmp_path):
    done = run(KILLED, tmp_path)
    assert done.returncode == -9, done.stderr
    assert not list(tmp_path.glob("*wandb*"))


def test_timm_has_it_when_it_uses_it(tmp_path):
    done = run(USED, tmp_path)
    assert done.stdout.split() == [version("wandb")] * 2, done.stderr
