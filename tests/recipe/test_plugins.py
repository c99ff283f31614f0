"""`plugins` in a recipe: a plain nn.Module from a file of the user's, built, trained and exported by its name."""

import sys
from pathlib import Path

import pytest
import torch
import yaml

import widemix
from tests.conftest import train_lines
from widemix import metrics
from widemix.cli.parser import make_parser
from widemix.data_prep.sources import SOURCES
from widemix.errors import InputError
from widemix.formats.manifest import read_manifest
from widemix.models.export import loading_lines
from widemix.models.families import KINDS
from widemix.recipe import dump_recipe, load_recipe, losses, parse_recipe, plugins

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

    def build(self, image_size, num_classes):
        return Linear(image_size, num_classes)
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
    values = {**yaml.safe_load(dump_recipe(loaded)), "plugins": ["my_plugin"]}
    KINDS.pop("my_linear")
    sys.modules.pop("my_plugin")
    assert type(parse_recipe(values).model).__name__ == "LinearSection"  # imported anew


def test_a_layer_without_sizes_is_refused(recipe: Path) -> None:
    lazy = PLUGIN.replace("nn.Linear(3 * side**2, num_classes)", "nn.LazyLinear(num_classes)")
    recipe.with_name("my_plugin.py").write_text(lazy)
    with pytest.raises(InputError, match=r"model: head\.weight of a my_linear has no shape yet"):
        widemix.build_model(load_recipe(recipe))


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


def test_its_export_is_loaded_by_a_line_with_it(recipe: Path, digits: Path) -> None:
    short = {"data.path": digits, "data.workers": 1, "train.max_steps": 2}
    loaded = load_recipe(recipe, [(name, str(value)) for name, value in short.items()])
    run, exported = recipe.with_name("run"), recipe.with_name("exported")
    done = widemix.train(loaded, run)
    assert done is not None
    from widemix.evaluation.export import export_checkpoint, load_trained

    _, line = export_checkpoint(run, exported)
    card = (exported / "README.md").read_text()
    ours = loading_lines(exported, ["my_plugin"])
    assert ours[0] == "import widemix, my_plugin, timm"
    assert ours[0] in card
    x = torch.randn(2, 3, 8, 8)
    expected = load_trained(run)[1].eval()(x)
    for lines in (line, "\n".join(ours)):
        names: dict[str, torch.nn.Module] = {}
        exec(lines, names)
        assert torch.equal(names["model"](x), expected)
    assert f"| 2 | {digits.name} | test | {done['loss']:.4f} | {done['top1']:.2f} % |" in card
    assert "plugins:\n- my_plugin" in card


SOURCE = """
import numpy as np
from widemix.plugins import Dataset, Sample, register_source

def read(origin):
    pixels = np.zeros((8, 8, 8, 3), np.uint8)
    return Dataset(("one", "other"), {"train": [Sample(str(k), k % 2, pixels[k]) for k in range(8)]})

register_source("stripes", "my_source.read", "striped images", takes_origin=False)
"""
METRICS = """
from torchmetrics.classification import MulticlassAccuracy
from widemix.recipe.losses import softmax_loss
from widemix.plugins import PERCENT, LossSpec, Metric, register_loss, register_metric

register_loss("triple", LossSpec(lambda logits, targets: 3 * softmax_loss(logits, targets), "three times softmax"))
register_metric("micro", Metric("fraction", PERCENT, True, lambda n: MulticlassAccuracy(n, average="micro")))
"""


def test_its_loss_is_trained_with_and_its_figure_evaluated(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_metrics.py").write_text(METRICS)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"extends: {ROOT}/recipes/digits/mixer.yaml\nplugins: [my_metrics]\n")
    measured = metrics.MEASURED["class"]
    short = {"data.path": digits, "data.workers": 1, "train.max_steps": 1, "log.every": 1, "model.depth": 1}
    try:
        for loss in ("softmax", "triple"):
            changes = short | {"train.loss": loss, "train.keep_best": "micro"}
            loaded = load_recipe(recipe, [(name, str(value)) for name, value in changes.items()])
            done = widemix.train(loaded, tmp_path / loss)
            assert done is not None
            assert done["micro"] == pytest.approx(done["top1"])
        one, three = (train_lines(tmp_path / loss)[0]["loss"] for loss in ("softmax", "triple"))
        assert three == pytest.approx(3 * one, rel=1e-6)
        assert f"fraction {done['micro']:.2f} %" in metrics.all_metrics(done)
        with pytest.raises(InputError, match=r"train.keep_best mirco is not measured .*, macro_f1, micro or loss"):
            load_recipe(recipe, [("train.keep_best", "mirco")])
        with pytest.raises(ValueError, match="loss triple is already registered"):
            losses.register("triple", losses.LOSSES["softmax"])
    finally:
        metrics.MEASURED["class"] = measured
        metrics.METRICS.pop("micro", None)
        losses.LOSSES.pop("triple", None)
        sys.modules.pop("my_metrics", None)


@pytest.mark.parametrize(
    ("key", "value", "method"),
    [
        ("train.head_bias", "-3.0", "get_classifier"),
        ("train.activation_checkpointing", "true", "set_grad_checkpointing"),
        ("train.freeze", "[body]", "get_classifier"),
        ("optim.name", "muon", "get_classifier"),
    ],
)
def test_a_key_that_needs_a_method_of_timms_names_it(
    key: str, value: str, method: str, recipe: Path, digits: Path
) -> None:
    loaded = load_recipe(recipe, [("data.path", str(digits)), ("train.max_steps", "1"), (key, value)])
    with pytest.raises(
        InputError, match=f"^{key}.*: needs the method {method} of timm's networks; define it in Linear"
    ):
        widemix.train(loaded, recipe.with_name("run"))


def test_an_incomplete_family_is_one_line(recipe: Path) -> None:
    plugin = recipe.with_name("my_plugin.py")
    plugin.write_text(plugin.read_text().replace("def build", "def built"))
    with pytest.raises(InputError, match="LinearSection: must define build"):
        load_recipe(recipe)


def test_prep_reads_a_plugins_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_source.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    to = tmp_path / "data"
    arguments = make_parser().parse_args(["prep", "stripes", "--plugins", "my_source", "--to", str(to)])
    try:
        arguments.command(arguments)
    finally:
        SOURCES.pop("stripes", None)
        sys.modules.pop("my_source", None)
    assert read_manifest(to).splits["train"].samples == 8
    arguments.plugins = ["my_sauce"]
    with pytest.raises(InputError, match=r"^--plugins: there is no module my_sauce; install it, or add"):
        arguments.command(arguments)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("no_such_plugin", None, "there is no module no_such_plugin; install it, or add"),
        ("no_such_package.parts", None, "there is no module no_such_package.parts; install it"),
        ("json.no_such_part", None, "there is no module json.no_such_part; install it"),
        ("my_tools", "import my_tool", r"my_tools cannot be imported \(.*No module named 'my_tool'\)$"),
        ("taken", "from widemix.plugins import *\nregister_loss('mse', LossSpec(len, ''))",
         "taken: loss mse is already registered$"),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_imported_is_named(name, text, words, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    if text:
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(InputError, match=f"^here: {words}"):
        plugins.import_modules(iter(["json", name]), "here")
    sys.modules.pop(name, None)
