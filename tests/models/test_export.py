"""What is exported, timm loads back to equal logits; so do timm or torch alone where widemix can't be imported."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from widemix.errors import InputError
from widemix.formats.manifest import Prepared
from widemix.models.baselines.section import FfOnlySection, PermutatorSection, RepMlpSection
from widemix.models.export import Usage, export_model, loading_lines, loads_in_timm, read_usage
from widemix.models.families import named_networks
from widemix.models.mixer.network import Mixer, from_timm
from widemix.models.mixer.section import MixerSection
from widemix.models.plain_mlps.section import BottleneckMlpSection, LassoSection, ShallowSection
from widemix.models.program import inputs_for
from widemix.models.registry import build_model
from widemix.models.sw_mlp.section import SwMlpSection
from widemix.models.text.section import TextMixerSection, TextTransformerSection
from widemix.models.timm_networks.section import GmlpSection, ResMlpSection, TimmSection
from widemix.models.timm_registry import default_cfgs
from widemix.recipe.data import DataSection, TextDataSection

PATCHED = {"patch_size": 4, "channels": 16, "depth": 2}
MIXER = MixerSection(kind="mixer", **PATCHED, expansion=2)
SECTIONS = {
    "mixer": MIXER,
    "rp": MIXER.model_copy(update={"permutation": "random", "permuted_blocks": (1,)}),
    "rp_s_mixer": MixerSection(kind="s_mixer", **PATCHED, permutation="random", project_tokens=9),
    "sw_mlp": SwMlpSection(kind="sw_mlp", **PATCHED, width=30, project_features=True, density=0.3, expansion=1.5),
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
ANY = SECTIONS["of any size"]
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


def trained(section, side=16):
    model = build_model(section, side, 3)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("index"):  # permutations that no seed gives
            buffer.copy_(buffer.flip(0))
    return model.eval()


# Of timm's sizes S/32, other images and hidden widths: D_S 100 of C = 512 is no float that timm gets back by itself.
TIMMS = MixerSection(kind="mixer", patch_size=32, channels=512, depth=8, token_hidden=100, channel_hidden=64)
STOCK = {"timm", "with arguments", "of any size", "timm's mixer"}
KINDS = {**SECTIONS, "timm's mixer": TIMMS, **TEXTS}
SCRIPT = """
import json, sys
from pathlib import Path
sys.modules["widemix"] = None  # importing it fails
import timm, torch
from safetensors.torch import load_file

for folder in sorted(Path(sys.argv[1]).iterdir()):
    expected, text = load_file(folder.parent.parent / f"{folder.name}.safetensors"), {"config.json": ""}
    if (folder / "model.pt2").exists():
        network = torch.export.load(folder / "model.pt2", extra_files=text).module()
        labels = json.loads(text["config.json"])["label_names"]
    else:
        network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        labels = network.pretrained_cfg["label_names"]
    with torch.no_grad():
        for count in (1, 2, 5):
            difference = (network(expected["inputs"][:count]) - expected["logits"][:count]).abs().max()
            assert difference <= 1e-5 * expected["logits"].abs().max(), (folder, difference)
    print(folder.name, (folder / "model.pt2").exists(), *labels, sep=",")
"""


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> Path:
    """A folder of each kind's export, with what the network computes; of text networks one has a tokenizer."""
    folder, texts = tmp_path_factory.mktemp("exports") / "deep" / "it's one", tmp_path_factory.mktemp("texts")
    (texts / "tokenizer.json").write_text("words")
    for name, section in KINDS.items():
        side = 64 if section is TIMMS else 16
        data = OUTER["data"].model_copy(update={"image_size": side})
        if name in TEXTS:
            path = texts if name == "text_mixer" else texts / "none"
            data = TextDataSection(kind="text", path=str(path), num_classes=3)
        model = trained(section, side)
        export_model(model, section, folder / name, data=data, labels=OUTER["labels"])
        inputs = inputs_for(section, side, 5)
        save_file({"inputs": inputs, "logits": model(inputs).detach()}, folder.parent / f"{name}.safetensors")
    return folder


FIRST = {"shallow": "stem.0.right", "s_local": "stem.0", "bottleneck_mlp": "stem", "of any size": "conv1.0"}
FIRST |= {"with arguments": "patch_embed.proj"}


@pytest.mark.parametrize("name", KINDS)
def test_timm_loads_it_back_to_equal_logits(name, exports):
    folder = exports / name
    files = [path.name for path in folder.iterdir()]
    expected = {"config.json", "model.safetensors"} | (set() if name in STOCK else {"model.pt2"})
    assert set(files) == expected | ({"tokenizer.json"} if name == "text_mixer" else set())
    assert name != "text_mixer" or (folder / "tokenizer.json").read_text() == "words"
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # whoever may read one may read all
    assert folder.stat().st_mode & 0o777 == 0o755
    names: dict[str, Any] = {}
    exec("\n".join(loading_lines(folder, stock=name in STOCK)), names)
    loaded, computed = names["model"], load_file(exports.parent / f"{name}.safetensors")
    atol = 1e-5 * computed["logits"].abs().max().item()
    torch.testing.assert_close(loaded(computed["inputs"]), computed["logits"], rtol=0, atol=atol)
    config = json.loads((folder / "config.json").read_text())
    assert config["label_names"] == ["ant", "bee", "cat"]
    if name not in TEXTS:
        side = computed["inputs"].shape[-1]
        said = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop_pct": 0.9, "input_size": [3, side, side]}
        said |= {"fixed_input_size": name != "of any size", "classifier": "fc" if name == "of any size" else "head"}
        said |= {"first_conv": FIRST.get(name, "stem.proj"), "num_classes": 3}
        assert {key: config["pretrained_cfg"][key] for key in said} == said
        assert {key: loaded.pretrained_cfg[key] for key in ("mean", "std", "crop_pct")}.items() <= said.items()
        assert list(loaded.pretrained_cfg["input_size"]) == said["input_size"]


def test_logits_without_widemix_are_the_runs(exports):
    words = [sys.executable, "-c", SCRIPT, exports]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [f"{name},{name not in STOCK},ant,bee,cat" for name in sorted(KINDS)]


@pytest.mark.parametrize(
    "change",
    [
        {"permutation": "random"},
        {"token_groups": 2},
        {"token_weights": "monarch"},
        {"channel_weights": "kronecker"},
        {"patch_size": 64},
        {"channels": 768},
        {"depth": 12},
    ],
    ids=str,
)
def test_timm_alone_has_no_such_mixer(change):
    assert loads_in_timm(TIMMS, 64)
    assert not loads_in_timm(TIMMS.model_copy(update=change), 64)


@pytest.mark.parametrize(("rises", "rate"), [(False, 0.2), (True, None)])
def test_timm_trains_on_with_the_same_stochastic_depth(rises, rate):
    section = TIMMS.model_copy(update={"drop_path": 0.2, "drop_path_rises": rises})
    assert section.timm_spec(64, ())[1].get("drop_path_rate") == rate


def test_timms_own_mixers_become_ours_with_equal_logits():
    mixer = timm.create_model("mixer_s32_224", img_size=64, mlp_ratio=[0.3, 1.5]).eval()
    ours = from_timm(mixer).eval()
    images = torch.randn(2, 3, 64, 64)
    assert type(ours) is Mixer
    assert torch.equal(ours(images), mixer(images))
    for other in ("gmixer_12_224", "resmlp_12_224", "test_resnet"):
        network = timm.create_model(other)
        assert from_timm(network) is network


def test_a_network_without_a_program_is_exported_with_a_warning(tmp_path, capfd):
    class Branching(torch.nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    folder, cards = tmp_path / "out", []
    export_model(Branching(), MIXER, folder, **OUTER, card=lambda program: str(cards.append(program)))
    assert f"warning: {folder}: has no model.pt2, mixer: cannot be written" in capfd.readouterr().err
    assert cards == [False]
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]


@pytest.mark.long
def test_a_published_network_keeps_its_name():
    for name, (section, side) in named_networks().items():
        trained = {"drop_path"} & section.model_dump().keys()
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
    export_model(trained(ANY), ANY, tmp_path / "exported", data=data, labels=OUTER["labels"])
    assert json.loads((tmp_path / "exported/config.json").read_text())["pretrained_cfg"]["interpolation"] == said


def test_stochastic_depth_leaves_a_network_its_name():
    section, side = named_networks()["rp_mixer_ss8_32"]
    for rate in (0.0, 0.2):
        dropped = section.model_copy(update={"drop_path": rate})
        name, arguments = dropped.timm_spec(side, default_cfgs)
        assert (name, arguments["drop_path"]) == ("rp_mixer_ss8_32", rate)
    others = (section.model_copy(update={"permutation_seed": 1}), side), (section, 2 * side)
    for other, size in others:
        assert other.timm_spec(size, default_cfgs)[0] == "widemix_mixer"
    assert section.timm_spec(side, {"mixer_ss8_32"})[0] == "widemix_mixer"  # timm has no other by that name


def test_what_an_export_says_of_its_use_is_read_back(tmp_path):
    prepared = Prepared(classes=("x",), max_size=77, side="shortest", to_8_bit_rgb=True)
    data = OUTER["data"].model_copy(update={"targets": "multilabel"})
    labels = {"labels": OUTER["labels"], "loss": "sigmoid", "prepared": prepared, "card": lambda program: "# A card"}
    export_model(trained(ANY), ANY, tmp_path / "exported", data=data, **labels)
    usage = read_usage(tmp_path / "exported/config.json")
    assert usage == Usage(targets="multilabel", loss="sigmoid", max_size=77, side="shortest", to_8_bit_rgb=True)
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


@pytest.mark.parametrize("stored", ["shared by two layers", "with gaps"])
def test_weights_may_lie_in_memory_in_any_way(tmp_path, stored):
    model = trained(MIXER).to(memory_format=torch.channels_last)
    model.head.weight.data = model.head.weight.data.t().contiguous().t()
    if stored == "shared by two layers":
        model.blocks[1].mlp_tokens.fc1.weight = model.blocks[0].mlp_tokens.fc1.weight
    export_model(model, MIXER, tmp_path / "exported", **OUTER)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True)
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
