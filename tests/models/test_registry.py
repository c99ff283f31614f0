"""Our names in timm's registry."""

from typing import Literal

import pytest
import timm
import torch

from widemix.errors import InputError
from widemix.models.families import named_networks
from widemix.models.mixer.section import MixerSection
from widemix.models.registry import build_model, build_on_meta, classifier
from widemix.models.section import ModelSection
from widemix.models.timm_registry import default_cfgs
from widemix.recipe import load_recipe

NAMED = named_networks()
TIMM_OWN = ("mixer_s32_224", "mixer_s16_224", "mixer_b32_224", "mixer_b16_224", "mixer_l32_224", "mixer_l16_224")


def shapes_of(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in model.state_dict().items() if not key.endswith("index")}


@pytest.mark.parametrize("name", TIMM_OWN)
def test_timms_own_names_are_timms_with_our_shapes(name):
    """So that its weights load into ours and into RP Mixers, but for the permutations; D_S and D_C are in them."""
    assert name in NAMED
    assert name not in default_cfgs
    with torch.device("meta"):
        theirs, rp, ours = timm.create_model(name), timm.create_model(f"rp_{name}"), build_model(*NAMED[name], 1000)
    assert type(theirs) is timm.models.mlp_mixer.MlpMixer
    assert shapes_of(ours) == shapes_of(rp) == shapes_of(theirs)
    assert {key.rsplit(".", 1)[-1] for key in rp.state_dict().keys() - theirs.state_dict().keys()} == {"index"}


@pytest.mark.parametrize("tokens", [9, 16])
def test_tokens_that_timm_gives_a_mixer_are_projected_ones(tokens):
    sizes = {"patch_size": 4, "channels": 8, "depth": 1, "token_hidden": 24, "channel_hidden": 32}
    section = MixerSection(kind="mixer", project_tokens=tokens, **sizes)
    with torch.device("meta"):
        found = timm.create_model("widemix_mixer", img_size=16, project_tokens=tokens, **sizes)
        expected = build_model(section, 16, 1000)
    assert shapes_of(found) == shapes_of(expected)


def test_our_names_are_those_that_timm_lacks():
    assert set(default_cfgs) >= set(NAMED) - set(TIMM_OWN) | {"text_mixer", "text_transformer"}
    assert not [name for name in default_cfgs if name in TIMM_OWN]


@pytest.mark.parametrize("kind", ["text_mixer", "text_transformer"])
def test_a_text_model_without_arguments_is_the_recipes(kind):
    recipe = load_recipe("mnli/mixer", [("model.kind", kind)])
    with torch.device("meta"):
        found, expected = timm.create_model(kind, img_size=224), build_model(recipe.model, 0, recipe.data.num_classes)
    assert shapes_of(found) == shapes_of(expected)


@pytest.mark.parametrize("name", sorted(set(NAMED) - set(TIMM_OWN)))
def test_every_name_builds_with_its_configuration(name):
    assert timm.is_model(name)
    with torch.device("meta"):
        model = timm.create_model(name, **({} if name.startswith(("shallow", "s_fc", "s_local")) else {"depth": 1}))
    assert model.pretrained_cfg["architecture"] == name
    side = int(name.rsplit("_", 1)[-1])
    assert model.pretrained_cfg["input_size"] == (3, side, side)
    read = {key: model.pretrained_cfg[key] for key in ("crop_pct", "interpolation", "mean", "std", "num_classes")}
    assert read == {
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "num_classes": 1000,
    }
    assert model.get_submodule(model.pretrained_cfg["first_conv"]).weight is not None
    with torch.device("meta"):
        assert model(torch.empty(2, 3, side, side)).shape == (2, 1000)
    indices = [key for key in model.state_dict() if key.endswith("index")]
    assert bool(indices) == name.startswith("rp_")


class Odd(torch.nn.Linear):
    """A network that computes with its weights when it is made, or has a tensor that is neither weight nor buffer."""

    def __init__(self, num_classes, computes):
        super().__init__(3, num_classes)
        self.offset = self.weight.sum().item() if computes else torch.ones(3)


def section_of(network, **arguments):
    """A section outside the package that makes this network."""

    class Section(ModelSection):
        kind: Literal["other"] = "other"

        def build(self, image_size, num_classes):
            return network(num_classes=num_classes, **arguments)

    return Section()


@pytest.mark.parametrize("computes", [True, False])
def test_a_network_that_needs_weights_is_never_hollow(computes):
    section = NAMED["mixer_s32_224"][0]
    assert all(tensor.is_meta for tensor in build_on_meta(section, 224, 10).state_dict().values())
    torch.manual_seed(0)
    network = build_on_meta(section_of(Odd, computes=computes), 224, 10)
    torch.manual_seed(0)
    assert torch.equal(network.weight, torch.nn.Linear(3, 10).weight)


@pytest.mark.parametrize(
    ("error", "is_of_memory"),
    [
        (MemoryError(), True),
        (OverflowError("int too large"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("Storage size calculation overflowed"), True),
        (RuntimeError("sizes do not match"), False),
    ],
)
def test_what_does_not_fit_into_memory_is_one_line(error, is_of_memory):
    def fail(**arguments):
        raise error

    with pytest.raises(InputError if is_of_memory else RuntimeError) as raised:
        build_model(section_of(fail), 224, 10)
    assert ("does not fit into memory" in str(raised.value)) == is_of_memory


def test_a_network_has_a_class_at_least():
    section = NAMED["mixer_s32_224"][0]
    with torch.device("meta"):
        assert build_model(section, 224, 1).head.out_features == 1
    with pytest.raises(InputError, match=r"^data\.num_classes 0: is that of a prepared folder"):
        build_model(section, 224, 0)


def test_a_missing_method_of_timm_is_named():
    with pytest.raises(InputError, match=r"^train\.init_from: needs the method get_classifier .* in Linear"):
        classifier(torch.nn.Linear(2, 2), "train.init_from")
    heads = torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)
    distilled = torch.nn.Module()
    distilled.get_classifier = lambda: heads
    found = [id(parameter) for parameter in classifier(distilled, "").parameters()]
    assert found == [id(parameter) for head in heads for parameter in head.parameters()]
