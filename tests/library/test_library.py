"""The public names of `widemix`, and training from Python."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import widemix

RECIPE = Path(__file__).parents[2] / "recipes/digits/rp_mixer.yaml"


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(hasattr(widemix, name) for name in widemix.__all__)
    assert widemix.__version__ == version("widemix")
    with pytest.raises(AttributeError, match="no attribute 'Lodaer'"):
        widemix.Lodaer  # noqa: B018


def test_importing_it_imports_no_torch() -> None:
    program = "import sys, widemix; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=RECIPE.parents[2], check=True)


def test_a_recipe_is_prepared_built_trained_and_evaluated(tmp_path: Path) -> None:
    manifest = widemix.prepare("digits", tmp_path / "digits", per_class=16)
    assert manifest.splits["train"].samples == 160
    keys = {"data.path": tmp_path / "digits", "data.workers": 1, "train.epochs": 5, "train.max_steps": 2}
    small = {"model.depth": 1, "train.global_batch": 32, "log.tensorboard": "false", "log.every": 1}
    recipe = widemix.load_recipe(RECIPE, [(name, str(value)) for name, value in (keys | small).items()])
    assert widemix.build_model(recipe)(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
    done = widemix.train(recipe, tmp_path / "run")
    assert done is not None
    assert done["step"] == 2
    assert widemix.evaluate(tmp_path / "run") == {name: done[name] for name in ("loss", "top1", "top5")}
