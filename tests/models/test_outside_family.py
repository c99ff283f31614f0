"""A family of somebody else's: a plain nn.Module and its section, in a file outside the package."""

import subprocess
import sys
from itertools import pairwise
from typing import Annotated, Literal

import pytest
from pydantic import Field
from torch import nn

from tests.clone import CLONE
from widemix.errors import InputError
from widemix.estimate.hardware import Cluster
from widemix.estimate.report import estimate
from widemix.models import families
from widemix.models.cost import model_cost
from widemix.models.families import KINDS, register
from widemix.models.mixer.section import MixerSection
from widemix.models.registry import build_model
from widemix.models.section import ModelSection
from widemix.recipe import load_recipe
from widemix.section import Positive, key


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
    assert families.sections()[-1] is BagOfPatchesSection
    yield BagOfPatchesSection
    del KINDS["bag_of_patches"]


def test_its_cost_is_counted(family):
    section = family(kind="bag_of_patches", patch=4, widths=[16, 12])
    recipe = load_recipe("digits/mixer").model_copy(update={"model": section})
    cost = model_cost(recipe.model, 8, 10)
    network = build_model(recipe.model, 8, 10)
    assert cost.parameters == sum(parameter.numel() for parameter in network.parameters())
    layers = 4 * (48 * 16 + 16 * 12) + 12 * 10
    assert cost.forward_flops == 2 * layers
    assert cost.training_flops == 2 * (3 * layers - 4 * 48 * 16)  # the image needs no gradient
    rows = {row.name: row.value for row in estimate(recipe, Cluster(1, "a100"), 1000)}
    assert rows["parameters"] == cost.parameters
    assert "Omega" not in rows


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


def test_a_section_is_registered_once_and_told_of():
    seen = []
    families.WATCHERS.append(seen.append)
    try:
        assert register(MixerSection) is MixerSection  # again
        with pytest.raises(InputError, match="section 3: should be a class derived from ModelSection"):
            register(3)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="should be a class derived from ModelSection"):
            register(dict)  # type: ignore[type-var]
    finally:
        families.WATCHERS.pop()
    assert seen == [MixerSection]
    assert [section.__name__ for section in families.sections()][:2] == ["MixerSection", "SwMlpSection"]


def test_every_family_loads_without_torch():
    code = (
        "import sys\nfrom widemix.models.families import sections, named_networks\n"
        "from widemix.recipe import keys, load_recipe\n"
        "load_recipe('digits/rp_mixer'), load_recipe('mnli/transformer'), keys()\n"
        "summaries = [section.summary() for section, _ in named_networks().values()]\n"
        "print(len(summaries) > len(sections()), *(name in sys.modules for name in ('torch', 'timm', 'numpy')))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CLONE, check=True)
    assert answer.stdout.split() == ["True", "False", "False", "False"]
