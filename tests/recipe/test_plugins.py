"""`plugins` in a recipe: a plain nn.Module from a file of the user's, built, trained and exported by its name."""

import sys
from pathlib import Path

import pytest
import torch

import widemix
from pipeline.errors import InputError
from pipeline.models.export import loading_line
from pipeline.models.families import KINDS
from pipeline.recipe import dump_recipe, load_recipe, plugins

ROOT = Path(__file__).parents[2]
PLUGIN = """
from typing import Literal
from torch import nn
from widemix.plugins import ModelSection, key, register_family

class Linear(nn.Module):
    def __init__(self, side, num_classes):
        super().__init__()
        self.head = nn.Linear(3 * side**2, num_classes)

    def forward(self, x):
        return self.head(x.flatten(1))

@register_family
class LinearSection(ModelSection):
    kind: Literal["my_linear"] = key(..., "my_linear: one layer")

    def model_spec(self, image_size):
        return Linear, {"side": image_size}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    base = ROOT / "recipes/base/digits.yaml"
    (tmp_path / "recipe.yaml").write_text(f"extends: {base}\nplugins: [my_plugin]\nmodel: {{kind: my_linear}}\n")
    yield tmp_path / "recipe.yaml"
    KINDS.pop("my_linear", None)
    sys.modules.pop("my_plugin", None)


def test_a_plugins_network_is_built_by_its_name(recipe: Path) -> None:
    loaded = load_recipe(recipe, [("optim.weight_decay", "0.1")])
    assert loaded.plugins == ("my_plugin",)
    assert type(widemix.build_model(loaded)).__name__ == "Linear"
    again = recipe.with_name("again.yaml")
    again.write_text(dump_recipe(loaded))
    assert load_recipe(again) == loaded


def test_an_installed_packages_plugin_needs_no_key(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lab_networks-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-networks\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[widemix.plugins]\nlinear = my_plugin\n")
    monkeypatch.setattr(plugins, "_import_installed", plugins._import_installed.__wrapped__)
    recipe.write_text(recipe.read_text().replace("plugins: [my_plugin]\n", ""))
    assert type(widemix.build_model(recipe)).__name__ == "Linear"
    (package / "entry_points.txt").write_text("[widemix.plugins]\nlinear = my_plugni\n")
    with pytest.raises(InputError, match="lab-networks: its plugin my_plugni cannot be imported"):
        load_recipe(recipe)


def test_its_export_is_loaded_by_the_line_that_names_the_plugin(recipe: Path, digits: Path) -> None:
    short = {"data.path": digits, "data.workers": 1, "train.max_steps": 2}
    loaded = load_recipe(recipe, [(name, str(value)) for name, value in short.items()])
    run, exported = recipe.with_name("run"), recipe.with_name("exported")
    done = widemix.train(loaded, run)
    assert done is not None
    from pipeline.training.trained import export_checkpoint, load_trained

    _, line = export_checkpoint(run, exported)
    assert line == loading_line(exported, ["my_plugin"])
    assert line.startswith("import my_plugin, ")
    names: dict[str, torch.nn.Module] = {}
    exec(line, names)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(names["model"].eval()(x), load_trained(run)[1].eval()(x))
    card = (exported / "README.md").read_text()
    assert f"| 2 | {done['loss']:.4f} | {done['top1']:.2f} % |" in card
    assert "plugins:\n- my_plugin" in card


def test_modules_that_are_not_there_are_named(recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("my_plugin", "no_such_plugin"))
    with pytest.raises(
        InputError, match=r"recipe.yaml: plugins: there is no module no_such_plugin; install it, or add"
    ):
        load_recipe(recipe)
    (recipe.parent / "no_such_plugin.py").write_text("import nothing_of_that_name")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        load_recipe(recipe)
