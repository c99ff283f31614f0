"""The code that moves rows, built with sanitizers, on sizes around those of its vectors."""

import os
import subprocess
import sys

import pytest

from pipeline.native.build import SOURCES
from tests.conftest import ROOT
from tests.native.fuzz import FLAGS, SANITIZERS

SCRIPT = """
import ctypes, itertools, sys
import torch
from pipeline.models.batch_last import by_c

by_c.open_library = lambda: ctypes.CDLL(sys.argv[1])
sizes = ((1, 2), (1, 33), (1, 6, 48), (0, 3, 16, 31, 79), (torch.float32, torch.bfloat16))
for threads, tokens, channels, batch, kind in itertools.product(*sizes):
    torch.set_num_threads(threads)
    size = tokens * channels
    x, g = torch.randn(2, size, batch).to(kind).unbind()
    weight, bias = torch.randn(2, channels).unbind()
    for index in (None, torch.randperm(size).int()):
        _, mean, scale = by_c.norm(x, weight, bias, 1e-6, index, kind)
        by_c.norm_backward(g, x, weight, index, mean, scale)
        by_c.add(g, x, bias, index)
        by_c.add(None, x, None, index)
        by_c.add_backward(g, index, channels, kind)
    by_c.activate(x.view(channels, tokens * batch), bias)
    by_c.activate_backward(g.view(channels, tokens * batch), x.view(channels, tokens * batch), bias)
print("ended")
"""


def runtime(name: str) -> str:
    """The path of a sanitizer's library, which has to be loaded before Python."""
    found = subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    return found.strip()


def test_no_access_out_of_range(tmp_path):
    library = tmp_path / "rows.so"
    build = ["cc", *FLAGS, *SANITIZERS, "-shared", "-fPIC", "-o", library, SOURCES / "batch_last.c", "-lm"]
    try:
        subprocess.run(build, check=True, capture_output=True)
        before = f"{runtime('libasan.so')}:{runtime('libubsan.so')}"
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs a C compiler with sanitizers ({error})")
    environ = os.environ | {"LD_PRELOAD": before, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT, library], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
