"""The public names: their types, as a strict mypy sees them, the pages about them, and timm's names of them."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from timm.data.transforms_factory import transforms_imagenet_eval, transforms_imagenet_train

import widemix
from tests.conftest import ROOT
from widemix.api import reference
from widemix.api.loader_arguments import NONE_MEANS, RENAMED, WITHOUT
from widemix.errors import InputError

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


def test_every_argument_of_timms_is_ours_or_answered() -> None:
    ours, theirs = set(inspect.signature(widemix.Loader).parameters), set(reference.timm_arguments())
    answered = RENAMED.keys() | WITHOUT.keys()
    assert theirs - ours == answered  # none is forgotten, and none that we have is refused
    assert {name for named in RENAMED.values() for name in named.split(" and ")} <= ours


def test_what_timms_none_stands_for() -> None:
    crop = transforms_imagenet_train(32, scale=None, ratio=None).transforms[0]
    assert (tuple(crop.scale), tuple(crop.ratio)) == (NONE_MEANS["scale"], NONE_MEANS["ratio"])
    resize = transforms_imagenet_eval(70, crop_pct=None).transforms[0]
    assert resize.size == 70 / NONE_MEANS["crop_pct"]
    jitters = transforms_imagenet_train(32, color_jitter=0.4, color_jitter_prob=None).transforms
    assert "ColorJitter" in [type(step).__name__ for step in jitters]  # without RandomApply: always


@pytest.mark.parametrize("name", [*RENAMED, *WITHOUT])
def test_a_name_of_timms_is_answered(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"no argument '{name}': it is timm's") as caught:
        widemix.Loader(tmp_path, "train", 4, **{name: 1})  # type: ignore[arg-type]
    assert RENAMED.get(name, WITHOUT.get(name, "")) in str(caught.value)


def test_the_page_is_the_signatures() -> None:
    page = (ROOT / "docs/reference/timm_names.md").read_text()
    assert page == reference.timm_page(), "stale: `python -m widemix.api.reference docs/reference`"
    assert "| `color_jitter` | `0.4` | `0` |" in page
    assert "| `re_mode` | `const` | `pixel` |" in page
    assert "| `mixup` | `1` | `0` |" in page
