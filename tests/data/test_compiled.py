"""numba's cache: complete for ranks that start at once, and not compiled again."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from widemix.native import compiled

# Boxes without images: the compiled functions of others are kept in the same way.
SCRIPT = """
import numpy as np
from widemix.data.decode import padded_boxes
sides = np.full(9, 40)
print(padded_boxes(np.arange(9), sides, sides, 32, 4, 1, 2, 0.5).tolist())
"""


def start(cache: Path) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=environment | {"XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def files(cache: Path) -> dict[Path, tuple[int, int]]:
    """The files of the cache, each with its time and size."""
    found = (path for path in cache.rglob("*") if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in found}


def test_four_ranks_start_at_once_and_the_next_compiles_nothing(tmp_path):
    (tmp_path / "widemix").mkdir()
    shutil.copy(compiled(), tmp_path / "widemix")  # whose building has a test of its own
    ranks = [start(tmp_path) for _ in range(4)]
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, outputs
    assert len(set(outputs)) == 1
    before = files(tmp_path)
    assert {"padded_boxes", "key", "uniform"} <= {path.name.split("-")[0].split(".")[-1] for path in before}
    later = start(tmp_path)
    assert later.communicate(timeout=600)[0] == outputs[0]
    assert files(tmp_path) == before
