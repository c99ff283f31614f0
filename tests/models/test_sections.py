"""The model section, one of the families': which one `kind` picks, and the errors of wrong keys."""

import subprocess
import sys

import pytest
import yaml

from tests.clone import CLONE, ROOT
from widemix.errors import InputError
from widemix.models import families
from widemix.models.mixer.section import MixerSection
from widemix.models.section import hidden_width
from widemix.models.sw_mlp.section import SwMlpSection
from widemix.recipe import keys, load_recipe

MNLI = ROOT / "recipes/mnli/transformer.yaml"
RECIPE = {
    "data": {"path": "data", "num_classes": 10, "image_size": 8},
    "model": {"kind": "s_mixer", "patch_size": 2, "tokens": 16, "channels": 8, "depth": 3},
    "optim": {"lr": 1e-3},
    "train": {"epochs": 1, "global_batch": 8},
}
SW_MLP = {"kind": "sw_mlp", "patch_size": 2, "width": 32, "depth": 2, "density": 0.5}


@pytest.fixture
def recipe(tmp_path):
    def write(**model):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({**RECIPE, "model": model or RECIPE["model"]}))
        return path

    return write


def test_kind_picks_the_family(recipe):
    assert isinstance(load_recipe(recipe()).model, MixerSection)
    assert isinstance(load_recipe(recipe(**SW_MLP)).model, SwMlpSection)
    assert load_recipe(recipe(**SW_MLP), [("model.density", "0.25")]).model.density == 0.25


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"kind": "mixxer"}, r"model.kind 'mixxer': no such kind; did you mean mixer\?"),
        ({"kind": "vgg"}, "model.kind 'vgg': no such kind; choose from mixer, s_mixer"),
        ({"density": "0.5"}, "the command line: model.density is not a key of kind s_mixer"),
        ({"tokens": "5"}, "images of 8 in patches of 2 have 16 tokens"),
        ({"patch_size": "3"}, "model.patch_size 3 does not divide data.image_size 8; 2, 4, 8 would"),
        ({"depth": "0"}, "the command line: model.depth 0: input should be greater than 0"),
        ({"permuted_blocks": "[3]"}, "a depth of 3 has blocks 0 to 2"),
        ({"permuted_layers": "each"}, "an s_mixer has one layer a mixing"),
        ({"expansion": "2"}, "an s_mixer has no hidden layer"),
        ({"permuted_skips": "true"}, "permuted_skips: is for an RP Mixer; set permutation to random"),
        ({"permuted_skips": "true", "permutation": "commutation"}, "permuted_skips: is for an RP Mixer"),
        ({"permuted_blocks": "[0]"}, "permuted_blocks: is for an RP Mixer; set permutation to random"),
        ({"permuted_mixings": "token"}, "permuted_mixings: is for an RP Mixer"),
        ({"token_groups": "3"}, "token_groups 3 does not divide channels 8"),
    ],
)
def test_what_is_wrong_costs_one_line(recipe, overrides, message):
    with pytest.raises(InputError, match=message):
        load_recipe(recipe(), [(f"model.{name}", value) for name, value in overrides.items()])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "mixer"}, "a mixer needs either expansion, or both token_hidden and channel_hidden"),
        ({"kind": "mixer", "token_hidden": 4}, "a mixer needs either expansion, or both"),
        ({"kind": "mixer", "channel_hidden": 4}, "a mixer needs either expansion, or both"),
        ({"kind": "mixer", "expansion": 2, "token_hidden": 4}, "say the same thing: give one of them"),
        ({"kind": "mixer", "expansion": 2, "channel_hidden": 4}, "say the same thing: give one of them"),
        ({"kind": "mixer", "expansion": 2, "token_hidden": 4, "channel_hidden": 4}, "a mixer needs either"),
        ({"kind": "mixer", "expansion": 2, "permuted_layers": "each"}, "permuted_layers: is for an RP Mixer"),
        ({"permuted_mixings": "channel"}, "permuted_mixings: is for an RP Mixer"),
        ({"permuted_blocks": []}, "permuted_blocks: is for an RP Mixer"),
        ({"permutation": "random", "permuted_layers": "each"}, "an s_mixer has one layer a mixing"),
        ({"token_hidden": 4}, "an s_mixer has no hidden layer"),
        ({"channel_hidden": 4}, "an s_mixer has no hidden layer"),
        ({"permutation": "random", "permuted_blocks": [0, 3, 4]}, r"permuted_blocks \[3, 4\]: a depth of 3"),
    ],
)
def test_widths_and_blocks_that_contradict_each_other_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        MixerSection(**RECIPE["model"] | keys)


def test_a_section_is_registered_once_and_told_of():
    seen = []
    families.WATCHERS.append(seen.append)
    try:
        assert families.register(MixerSection) is MixerSection  # again
        with pytest.raises(InputError, match="section 3: should be a class derived from ModelSection"):
            families.register(3)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="should be a class derived from ModelSection"):
            families.register(dict)  # type: ignore[type-var]
    finally:
        families.WATCHERS.pop()
    assert seen == [MixerSection]
    assert [section.__name__ for section in families.sections()][:2] == ["MixerSection", "SwMlpSection"]


def test_the_last_block_may_be_permuted_and_the_skips_of_an_rp_mixer(recipe):
    overrides = {"permutation": "random", "permuted_skips": "true", "permuted_blocks": "[0, 2]", "token_groups": "8"}
    model = load_recipe(recipe(), [(f"model.{name}", value) for name, value in overrides.items()]).model
    assert isinstance(model, MixerSection)
    assert (model.permuted_skips, model.permuted_blocks, model.token_groups) == (True, (0, 2), 8)


def test_missing_and_unknown_keys_are_named_without_the_kind(recipe):
    with pytest.raises(InputError, match=r"model\.kind is missing"):
        load_recipe(recipe(depth=2))
    with pytest.raises(InputError, match=r"model\.density is missing"):
        load_recipe(recipe(kind="sw_mlp", patch_size=2, width=20, depth=2))
    with pytest.raises(InputError, match=r"unknown key model\.widht; did you mean model\.width\?"):
        load_recipe(recipe(**SW_MLP, widht=3))


def test_the_table_of_keys_has_those_of_all_families():
    table = keys()
    assert {"mixer", "s_mixer", "sw_mlp"} <= set(table["model.kind"][0].split("|"))
    assert {"model.tokens", "model.density", "data.path"} <= set(table)
    assert table["model.depth"] == ("int", ..., "L: blocks")


def test_every_family_loads_without_torch():
    code = (
        "import sys\nfrom widemix.models.families import sections, named_networks\n"
        "from widemix.recipe import keys, load_recipe\n"
        f"load_recipe({str(ROOT / 'recipes/digits/rp_mixer.yaml')!r}), load_recipe({str(MNLI)!r}), keys()\n"
        "summaries = [section.summary() for section, _ in named_networks().values()]\n"
        "print(len(summaries) > len(sections()), *(name in sys.modules for name in ('torch', 'timm', 'numpy')))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CLONE, check=True)
    assert answer.stdout.split() == ["True", "False", "False", "False"]


def test_hidden_widths_are_rounded_and_one_at_least():
    assert [hidden_width(*each) for each in ((1.26, 6), (1.24, 6), (0.01, 8), (2.0, 5))] == [8, 7, 1, 10]
    assert SwMlpSection(**SW_MLP | {"expansion": 0.985}).hidden_width == 32
