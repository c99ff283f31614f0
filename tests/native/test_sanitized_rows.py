"""The code that computes blocks, built with sanitizers, on sizes around those of its vectors."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.stress.fuzz import FLAGS, SANITIZERS
from tests.stress.sanitized import preloads
from widemix.native.build import SOURCES

SCRIPT = """
import ctypes, itertools, sys
import torch
from widemix.models.batch_last import by_c
from widemix.models.mixer.blocks import MixerBlock
from widemix.models.mixer.section import MixerSection

by_c.open_library = lambda: ctypes.CDLL(sys.argv[1])
rp = {"permutation": "random", "permuted_skips": True}
shapes = ({}, rp, {"project_tokens": 10}, {"project_tokens": 3, "norm": "none"})
sizes = ((1, 2), (1, 33), (6, 31), (0, 37), (torch.float32, torch.bfloat16))
for shape, hidden in itertools.product(shapes, (None, 7)):
    if hidden and shape is rp:
        shape = shape | {"permuted_layers": "each"}
    for threads, tokens, channels, batch, kind in itertools.product(*sizes):
        torch.set_num_threads(threads)
        by_c._WORTH = 0
        kind_of = {"kind": "mixer", "token_hidden": 7, "channel_hidden": 7} if hidden else {"kind": "s_mixer"}
        sizes = {"patch_size": 1, "channels": channels, "depth": 1}
        section = MixerSection(**sizes | kind_of | shape)
        x = torch.randn(batch, tokens, channels).to(kind).requires_grad_()
        block = MixerBlock(section, 0, tokens).train()
        assert by_c.takes(block, x)
        y = by_c.forward(block, x)
        y.backward(y.detach())
        with torch.no_grad():
            by_c.forward(block, x)
print("ended")
"""


@pytest.mark.long
def test_no_access_out_of_range(tmp_path):
    library = tmp_path / "block.so"
    build = ["cc", *FLAGS, *SANITIZERS, "-shared", "-fPIC", "-o", library, SOURCES / "mixer_block.c", "-lm"]
    try:
        subprocess.run(build, check=True, capture_output=True)
        environ = os.environ | preloads() | {"PYTHONPATH": str(ROOT)}
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs a C compiler with sanitizers ({error})")
    done = subprocess.run([sys.executable, "-c", SCRIPT, library], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
