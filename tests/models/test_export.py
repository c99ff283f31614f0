"""What is exported, timm loads back to equal logits."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from widemix.errors import InputError
from widemix.formats.manifest import Prepared
from widemix.models.bottleneck_mlp.section import BottleneckMlpSection
from widemix.models.export import Usage, export_model, loading_lines, read_usage
from widemix.models.families import named_networks
from widemix.models.ff_only.section import FfOnlySection
from widemix.models.lasso.section import LassoSection
from widemix.models.mixer.section import MixerSection
from widemix.models.permutator.section import PermutatorSection
from widemix.models.registry import build_model
from widemix.models.repmlp.section import RepMlpSection
from widemix.models.shallow.section import ShallowSection
from widemix.models.sw_mlp.section import SwMlpSection
from widemix.models.text.section import TextMixerSection, TextTransformerSection
from widemix.models.timm_mlp.section import GmlpSection, ResMlpSection
from widemix.models.timm_model.section import TimmSection
from widemix.models.timm_registry import default_cfgs
from widemix.recipe.data import DataSection, TextDataSection

PATCHED = {"patch_size": 4, "channels": 16, "depth": 2}
MIXER = MixerSection(kind="mixer", **PATCHED, tokens=16, expansion=2)
SECTIONS = {
    "mixer": MIXER,
    "rp": MIXER.model_copy(update={"permutation": "random", "permuted_blocks": (1,)}),
    "rp_s_mixer": MixerSection(kind="s_mixer", **PATCHED, tokens=9, permutation="random", project_tokens=True),
    "sw_mlp": SwMlpSection(kind="sw_mlp", **PATCHED, width=30, project_tokens=True, density=0.3, expansion=1.5),
    "shallow": ShallowSection(kind="shallow", width=30, matrices="monarch"),
    "s_local": LassoSection(kind="s_local", base_channels=3),
    "bottleneck_mlp": BottleneckMlpSection(kind="bottleneck_mlp", width=6, depth=2),
    "ff_only": FfOnlySection(kind="ff_only", **PATCHED),
    "permutator": PermutatorSection(kind="permutator", **PATCHED),
    "repmlp": RepMlpSection(kind="repmlp", **PATCHED, share_sets=4),
    "resmlp": ResMlpSection(kind="resmlp", **PATCHED),
    "gmlp": GmlpSection(kind="gmlp", **PATCHED),
    "timm": TimmSection(kind="timm", name="resmlp_12_224"),
    "with arguments": TimmSection(kind="timm", name="vit_tiny_patch16_224", arguments={"patch_size": 4, "depth": 1}),
    "of any size": TimmSection(kind="timm", name="test_resnet"),
}
OUTER = {
    "data": DataSection(
        path="nowhere", num_classes=3, image_size=16, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), crop_pct=0.9
    ),
    "labels": ["ant", "bee", "cat"],
}
TEXT = {"vocabulary": 9, "tokens": 4, "channels": 8, "depth": 2, "expansion": 1.5}
TEXTS = {
    "text_mixer": TextMixerSection(kind="text_mixer", permutation="random", **TEXT),
    "text_transformer": TextTransformerSection(kind="text_transformer", heads=2, **TEXT),
}


def trained(section):
    model = build_model(section, 16, 3)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("index"):  # permutations that no seed gives
            buffer.copy_(buffer.flip(0))
    return model.eval()


FIRST = {"shallow": "stem.0.right", "s_local": "stem.0", "bottleneck_mlp": "stem", "of any size": "conv1.0"}
FIRST |= {"with arguments": "patch_embed.proj"}


@pytest.mark.parametrize("name", SECTIONS)
def test_timm_loads_it_back_to_equal_logits(name, tmp_path):
    section, folder = SECTIONS[name], tmp_path / "deep" / "it's one"
    model = trained(section)
    export_model(model, section, folder, **OUTER)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # whoever may read one may read all
    names: dict[str, Any] = {}
    exec("\n".join(loading_lines(folder)), names)
    loaded = names["model"].eval()
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(loaded(x), model(x))
    config = json.loads((folder / "config.json").read_text())
    said = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop_pct": 0.9, "input_size": [3, 16, 16]}
    said |= {"fixed_input_size": name != "of any size", "classifier": "fc" if name == "of any size" else "head"}
    said |= {"first_conv": FIRST.get(name, "stem.proj"), "num_classes": 3}
    assert {key: config["pretrained_cfg"][key] for key in said} == said
    assert {key: loaded.pretrained_cfg[key] for key in ("mean", "std", "crop_pct")}.items() <= said.items()
    assert list(loaded.pretrained_cfg["input_size"]) == said["input_size"]
    assert config["label_names"] == ["ant", "bee", "cat"]
    assert folder.stat().st_mode & 0o777 == 0o755


@pytest.mark.long
def test_a_published_network_keeps_its_name():
    for name, (section, side) in named_networks().items():
        trained = {"drop_path_rate"} & section.model_dump().keys()
        dropped = section.model_copy(update=dict.fromkeys(trained, 0.1))
        entry = timm.model_entrypoint(name)
        found, arguments = dropped.timm_spec(side, default_cfgs)
        if entry.__module__.startswith("timm."):  # plain Mixers: another class, with arguments of other names
            assert found == section.timm_architecture
        else:
            assert found == name
            assert dropped.timm_spec(2 * side, default_cfgs)[0] == section.timm_architecture
        timm.create_model(found, device="meta", **arguments)


@pytest.mark.parametrize(
    ("trained_by", "said"), [("bilinear", "bilinear"), ("bicubic", "bicubic"), ("random", "bicubic")]
)
def test_the_interpolation_of_the_evaluation_is_kept(trained_by, said, tmp_path):
    data = OUTER["data"].model_copy(update={"interpolation": trained_by})
    export_model(trained(MIXER), MIXER, tmp_path / "exported", data=data, labels=OUTER["labels"])
    assert json.loads((tmp_path / "exported/config.json").read_text())["pretrained_cfg"]["interpolation"] == said


def test_a_name_of_its_own_is_that_of_a_network_trained_by_stochastic_depth_too():
    section, side = named_networks()["rp_mixer_ss8_32"]
    for rate in (0.0, 0.2):
        dropped = section.model_copy(update={"drop_path": rate})
        name, arguments = dropped.timm_spec(side, default_cfgs)
        assert (name, arguments["drop_path_rate"]) == ("rp_mixer_ss8_32", rate)
    others = (section.model_copy(update={"permutation_seed": 1}), side), (section, 2 * side)
    for other, size in others:
        assert other.timm_spec(size, default_cfgs)[0] == "widemix_mixer"
    assert section.timm_spec(side, {"mixer_ss8_32"})[0] == "widemix_mixer"  # timm has no other by that name


def test_what_an_export_says_of_its_use_is_read_back(tmp_path):
    prepared = Prepared(classes=("x",), max_size=77, side="shortest")
    data = OUTER["data"].model_copy(update={"targets": "multilabel"})
    labels = {"labels": OUTER["labels"], "loss": "sigmoid", "prepared": prepared, "card": "# A card"}
    export_model(trained(MIXER), MIXER, tmp_path / "exported", data=data, **labels)
    usage = read_usage(tmp_path / "exported/config.json")
    assert usage == Usage(targets="multilabel", loss="sigmoid", max_size=77, side="shortest")
    assert (tmp_path / "exported/README.md").read_text() == "# A card"
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "plain.json").write_text('{"architecture": "resnet18"}')
    for name in ("list", "plain"):
        assert read_usage(tmp_path / f"{name}.json") == Usage(targets="class", loss="", max_size=0, side="longest")
    with pytest.raises(InputError, match=r"none\.json: cannot be read"):
        read_usage(tmp_path / "none.json")
    (tmp_path / "largest.json").write_text('{"widemix": {"max_size": 65535}}')
    assert read_usage(tmp_path / "largest.json") == Usage(max_size=65535)
    wrong = ["{", *(f'{{"widemix": {each}}}' for each in ('{"max_size": 65536}', '{"max_size": -1}', '{"side": ""}'))]
    for text in [*wrong, '{"widemix": {"targets": "boxes"}}']:
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(InputError, match=r"wrong\.json: cannot be read"):
            read_usage(tmp_path / "wrong.json")


def test_weights_that_two_layers_share_are_written_for_both(tmp_path):
    model = trained(MIXER)
    model.blocks[1].mlp_tokens.fc1.weight = model.blocks[0].mlp_tokens.fc1.weight
    export_model(model, MIXER, tmp_path / "exported", **OUTER)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True).eval()
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(loaded(x), model(x))


def test_weights_may_lie_in_memory_in_any_way(tmp_path):
    model = trained(MIXER).to(memory_format=torch.channels_last)
    model.head.weight.data = model.head.weight.data.t().contiguous().t()
    export_model(model, MIXER, tmp_path / "exported", **OUTER)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True).eval()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


def test_a_network_of_sentences_is_not_written_as_onnx(tmp_path):
    section = TEXTS["text_mixer"]
    data = TextDataSection(kind="text", path=str(tmp_path), num_classes=3)
    with pytest.raises(InputError, match=r"^--onnx: only networks of images are written as ONNX, not text_mixer"):
        export_model(trained(section), section, tmp_path / "out", data=data, labels=["a", "b", "c"], onnx=True)
    assert not list(tmp_path.iterdir())


def test_a_new_head_can_be_put_on(tmp_path):
    model = trained(MIXER)
    export_model(model, MIXER, tmp_path / "exported", **OUTER)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True, num_classes=9).eval()
    x = torch.randn(2, 3, 16, 16)
    assert loaded(x).shape == (2, 9)
    assert torch.equal(loaded.forward_features(x), model.forward_features(x))
    gray = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True, in_chans=1).eval()
    torch.testing.assert_close(gray(x[:, :1]), model(x[:, :1].expand(-1, 3, -1, -1)))


def test_nothing_is_overwritten(tmp_path):
    with pytest.raises(InputError, match="exists already"):
        export_model(trained(MIXER), MIXER, tmp_path, **OUTER)


def test_a_full_disk_is_an_error_of_the_disk(tmp_path):
    """A limit of the process stands for it: the file cannot grow. Nothing is left behind."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            export_model(trained(MIXER), MIXER, tmp_path / "out", **OUTER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    failed = Path(caught.value.filename)  # so that commands print one line
    assert failed.name == "model.safetensors"
    assert failed.parent.name.startswith(".out.")  # what a kill leaves says what it is
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("section", TEXTS.values(), ids=TEXTS)
def test_a_text_model_keeps_its_tokenizer(section, tmp_path):
    model, folder = trained(section), tmp_path / "exported"
    data = TextDataSection(kind="text", path=str(tmp_path), num_classes=3)
    export_model(model, section, tmp_path / "without", data=data, labels=["yes", "perhaps", "no"])
    assert sorted(path.name for path in (tmp_path / "without").iterdir()) == ["config.json", "model.safetensors"]
    (tmp_path / "tokenizer.json").write_text("words")
    export_model(model, section, folder, data=data, labels=["yes", "perhaps", "no"])
    assert (folder / "tokenizer.json").read_text() == "words"
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    ids = torch.tensor([[3, 8, 1, 0], [2, 5, 7, 4]])
    assert torch.equal(loaded(ids), model(ids))
