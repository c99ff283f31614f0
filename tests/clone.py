"""The folder in which tests run: that of an empty clone, whatever `make demo` and others have left in this one."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_VARIABLE = "WIDEMIX_TESTS_CLONE"  # of processes that tests start


def _make() -> Path:
    """Make a folder of links to what is in this clone, but for the folders that .gitignore names."""
    if known := os.environ.get(_VARIABLE):
        return Path(known)
    folder, process = Path(tempfile.mkdtemp(prefix="widemix-clone-")), os.getpid()
    left_out = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.startswith("/")]
    for path in ROOT.iterdir():
        if path.name not in left_out:
            (folder / path.name).symlink_to(path)
    atexit.register(lambda: os.getpid() == process and shutil.rmtree(folder, ignore_errors=True))
    os.environ[_VARIABLE] = str(folder)
    return folder


CLONE = _make()
