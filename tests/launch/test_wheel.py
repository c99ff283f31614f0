"""What the wheel installs: one package, which prepares and trains outside any checkout and without FFCV."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from widemix.errors import InputError
from widemix.recipe.files import SHIPPED, find_recipe, load_recipe

# None of these may be imported: what a checkout has at its top, and what is optional.
ABSENT = ("pipeline", "data_prep", "launch", "tests", "ffcv", "cv2")
PROGRAM = """
import sys
sys.modules.update(dict.fromkeys({absent}))
from widemix.__main__ import main
sys.argv = ["widemix", *{words}]
main()
"""


def test_it_prepares_and_trains_without_a_checkout_and_without_ffcv(tmp_path: Path) -> None:
    build = ["egg_info", "--egg-base", tmp_path, "build_py", "--build-lib", tmp_path / "installed"]
    setuptools = [sys.executable, "-c", "from setuptools import setup; setup()", "-q", *build]
    subprocess.run(setuptools, cwd=ROOT, check=True)
    assert [path.name for path in (tmp_path / "installed").iterdir()] == ["widemix"]
    installed = tmp_path / "installed/widemix"
    code = {path.relative_to(ROOT / "pipeline") for path in (ROOT / "pipeline").rglob("*.py")}
    for folder in ("data_prep", "launch"):
        code |= {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py")}
    assert {path.relative_to(installed) for path in installed.rglob("*.py")} == code
    recipes = {path.relative_to(ROOT) for path in (ROOT / "recipes").rglob("*.yaml")}
    assert {path.relative_to(installed) for path in installed.rglob("*.yaml")} == recipes

    def widemix(*words: str) -> str:
        program = PROGRAM.format(absent=ABSENT, words=words)
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path / "installed"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    widemix("prep", "digits", "--per-class", "16")
    steps = ("--train.max_steps", "2", "--train.global_batch", "32", "--log.tensorboard", "false")
    small = ("--model.depth", "1", "--data.workers", "1")
    assert "run: done, top-1" in widemix("train", "digits/rp_mixer", "--run-dir", "run", *steps, *small)


def test_the_folder_of_a_checkout_is_not_imported_by_its_own_name() -> None:
    done = subprocess.run([sys.executable, "-c", "import pipeline"], cwd=ROOT, capture_output=True, text=True)
    assert (
        done.stderr.splitlines()[-1]
        == "ImportError: pipeline/ is the folder of the package widemix: `import widemix`"
    )


def test_shipped_recipes_are_found_by_name_unless_there_is_a_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = SHIPPED / "digits/rp_mixer.yaml"
    for name in ("digits/rp_mixer", "digits/rp_mixer.yaml", "recipes/digits/rp_mixer.yaml"):
        assert find_recipe(name) == shipped
    assert load_recipe("digits/rp_mixer") == load_recipe(shipped)
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits/rp_mixer.yaml").write_text("")
    assert find_recipe("digits/rp_mixer.yaml") == Path("digits/rp_mixer.yaml")
    with pytest.raises(InputError, match=r"digits/rp_mixr.yaml: no such recipe; did you mean digits/rp_mixer.yaml"):
        load_recipe("digits/rp_mixr.yaml")
    with pytest.raises(InputError, match=r"mnist/monarh: no such recipe; did you mean mnist/monarch\?"):
        load_recipe("mnist/monarh")
