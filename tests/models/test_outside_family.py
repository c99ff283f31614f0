"""A family of somebody else's: a plain nn.Module and its section, in a file outside the package."""

from itertools import pairwise
from typing import Annotated, Literal

import pytest
import timm
import torch
from pydantic import Field
from torch import nn

from tests.conftest import ROOT
from widemix.errors import InputError
from widemix.estimate.hardware import Cluster
from widemix.estimate.report import estimate
from widemix.evaluation.assessment import evaluate_checkpoint
from widemix.evaluation.trained import export_checkpoint
from widemix.models.cost import model_cost
from widemix.models.export import export_model
from widemix.models.families import KINDS, register
from widemix.models.registry import build_model
from widemix.models.section import ModelSection
from widemix.recipe import dump_recipe, keys, load_recipe
from widemix.section import Positive, key
from widemix.trainer import train

RECIPE = """
extends: {base}
data: {{path: {data}}}
model: {{kind: bag_of_patches, patch: 4, widths: [16, 12]}}
"""


class BagOfPatches(nn.Module):
    """An MLP on each patch, and the mean of what it gives."""

    def __init__(self, patch: int, widths: tuple[int, ...], num_classes: int):
        super().__init__()
        self.cut = nn.Unfold(patch, stride=patch)
        sizes = (3 * patch**2, *widths)
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.BatchNorm1d(b))]
        self.body = nn.Sequential(*layers)
        self.fc = nn.Linear(sizes[-1], num_classes)

    def forward(self, x):
        patches = self.cut(x).transpose(1, 2)
        return self.fc(self.body(patches.flatten(0, 1)).unflatten(0, patches.shape[:2]).mean(1))


class BagOfPatchesSection(ModelSection):
    """The least that a family has: a kind, its keys, and what makes its network."""

    kind: Literal["bag_of_patches"] = key(..., "bag_of_patches: an MLP on each patch")
    patch: Positive = key(..., "side of a patch, pixels")
    widths: Annotated[tuple[Positive, ...], Field(strict=False)] = key((8,), "widths of the MLP")

    def model_spec(self, image_size):
        return BagOfPatches, {"patch": self.patch, "widths": self.widths}


@pytest.fixture
def family():
    register(BagOfPatchesSection)
    yield BagOfPatchesSection
    del KINDS["bag_of_patches"]


@pytest.fixture
def path(family, digits, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(base=ROOT / "recipes/base/digits.yaml", data=digits))
    return path


def test_it_loads_with_the_others_errors(path):
    recipe = load_recipe(path)
    assert isinstance(recipe.model, BagOfPatchesSection)
    again = path.with_name("again.yaml")
    again.write_text(dump_recipe(recipe))
    assert load_recipe(again) == recipe
    assert "bag_of_patches" in keys()["model.kind"][0].split("|")
    assert load_recipe(path, [("model.widths", "[5]")]).model.widths == (5,)
    for overrides, words in (
        ([("model.patch", "0")], "the command line: model.patch 0: input should be greater than 0"),
        ([("model.depth", "3")], "model.depth is not a key of kind bag_of_patches"),
        ([("model.kind", "bag_of_patch")], "did you mean bag_of_patches?"),
    ):
        with pytest.raises(InputError) as caught:
            load_recipe(path, overrides)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_its_cost_is_counted(path):
    recipe = load_recipe(path)
    cost = model_cost(recipe.model, 8, 10)
    network = build_model(recipe.model, 8, 10)
    assert cost.parameters == sum(parameter.numel() for parameter in network.parameters())
    layers = 4 * (48 * 16 + 16 * 12) + 12 * 10
    assert cost.forward_flops == 2 * layers
    assert cost.training_flops == 2 * (3 * layers - 4 * 48 * 16)  # the image needs no gradient
    rows = {row.name: row.value for row in estimate(recipe, Cluster(1, "a100"), 1000)}
    assert rows["parameters"] == cost.parameters
    assert "Omega" not in rows


def test_it_trains_evaluates_and_exports(path, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    short = [("train.max_steps", "3"), ("log.tensorboard", "false"), ("log.images", "0"), ("data.workers", "1")]
    recipe, run = load_recipe(path, short), tmp_path / "run"
    assert train(recipe, run, "auto", path) == 0
    assert evaluate_checkpoint(run, None, None, None)["loss"] < 5
    export_checkpoint(run, tmp_path / "exported")
    loaded = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True).eval()
    assert isinstance(loaded, BagOfPatches)
    assert loaded.pretrained_cfg["input_size"] == (3, 8, 8)


def test_timm_loads_an_export_to_equal_logits(path, tmp_path):
    recipe = load_recipe(path)
    model = build_model(recipe.model, 8, 3).eval()
    export_model(model, recipe.model, tmp_path / "exported", data=recipe.data, labels=["a", "b", "c"])
    x = torch.randn(2, 3, 8, 8)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True).eval()
    assert torch.equal(loaded(x), model(x))


def test_what_a_section_lacks_is_one_line():
    class NoKind(ModelSection):
        def model_spec(self, image_size):
            return BagOfPatches, {}

    class NoSpec(ModelSection):
        kind: Literal["no_spec"]

    class Taken(BagOfPatchesSection):
        kind: Literal["mixer"]

    class Text(BagOfPatchesSection):
        takes = "text"

    with pytest.raises(ValueError, match=r"NoKind: has no kind; declare `kind: Literal\[\.\.\.\]`"):
        register(NoKind)
    with pytest.raises(ValueError, match="NoSpec: must define model_spec"):
        register(NoSpec)
    with pytest.raises(ValueError, match="Taken: kind mixer is MixerSection's already"):
        register(Taken)
    with pytest.raises(InputError, match="does not say how many tokens it takes; define input_shape"):
        model_cost(Text(kind="bag_of_patches", patch=2), 0, 3)


def test_a_network_that_cannot_be_counted_is_one_line():
    class Looks(BagOfPatches):
        def forward(self, x):
            return super().forward(x) * x.max().item()

    class LooksSection(BagOfPatchesSection):
        def model_spec(self, image_size):
            return Looks, {"patch": self.patch, "widths": self.widths}

    with pytest.raises(InputError, match=r"counted on the meta device \(.*\); define layer_costs") as caught:
        model_cost(LooksSection(kind="bag_of_patches", patch=2), 8, 3)
    assert "\n" not in str(caught.value)


def test_a_kind_that_timm_uses_is_refused():
    class Taken(BagOfPatchesSection):
        kind: Literal["resnet18"]

    with pytest.raises(InputError, match="kind resnet18: is the name of one of timm's networks"):
        register(Taken)
    assert "resnet18" not in KINDS
