"""Types of the public names, as a strict mypy sees them in somebody's program; and the page about these names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from widemix.api import reference

SKIPPED = "torch timm numba deepspeed torchvision scipy sklearn matplotlib llvmlite mlflow wandb torchmetrics"  # 50 s


def mypy(folder: Path, *files: str) -> str:
    modules = ",".join(f"{name}.*" for name in SKIPPED.split())
    (folder / "mypy.ini").write_text(f"[mypy]\nfollow_imports = silent\n[mypy-{modules}]\nfollow_imports = skip\n")
    words = ["--strict", "--config-file", "mypy.ini", "--cache-dir", ROOT / ".mypy_cache/consumer", *files]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    program = [sys.executable, "-m", "mypy", *words]
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.long
def test_a_users_program_is_typed_strictly(tmp_path: Path) -> None:
    source = (ROOT / "tests/library/consumer.py").read_text()
    (tmp_path / "consumer.py").write_text(source)
    wrong = source.replace('resume="auto"', "resume=1").replace("View(image_size=96", "View(imagesize=96")
    (tmp_path / "wrong.py").write_text(wrong.replace("recipe.train.epochs + 1", "recipe.train.epoch"))
    said = mypy(tmp_path, "consumer.py", "wrong.py")
    assert [line for line in said.splitlines()[:-1] if not line.startswith("wrong.py:")] == []
    assert 'Argument "resume" to "train"' in said
    assert 'Extra key "imagesize" for TypedDict "View"' in said
    assert '"TrainSection" has no attribute "epoch"' in said


def test_the_page_about_python_is_the_codes() -> None:
    page = (ROOT / "docs/reference/python.md").read_text()
    assert page == reference.page(), "stale: `python -m widemix.api.reference docs/reference`"
    assert "`RandomErasing(re_prob, re_mode='pixel', re_count=1)`" in page
