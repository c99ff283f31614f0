"""Predictions for files against the evaluation of the same images, bit for bit, and against plain torchvision."""

import csv
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.conftest import ROOT
from tests.layouts import two_classes
from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser
from widemix.data.loader import EvalLoader
from widemix.data_prep.image import decode_file
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.evaluation.networks import load_network
from widemix.evaluation.predict import Predictor
from widemix.models.export import export_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    source, target = tmp_path_factory.mktemp("jpegs"), tmp_path_factory.mktemp("prepared")
    two_classes(source)
    prepare("image-folder", source, target, PrepSettings())
    return source, target


def predict(*words) -> int:
    return run_command(make_parser(), argv=["predict", *map(str, words)])


def network(tmp_path, prepared, pixels=(), loss="softmax"):
    """The network of a recipe file, with a head that tells images apart."""
    data = {"path": str(prepared), "num_classes": 2, "image_size": 32, "eval_split": "val", "crop_pct": 0.9}
    data |= {"interpolation": "bicubic", **dict(pixels)}
    values = {"extends": str(ROOT / "recipes/digits/s_mixer.yaml"), "data": data, "model": {"patch_size": 8}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(values | {"train": {"loss": loss}}))
    found = load_network(str(tmp_path / "recipe.yaml"))
    torch.nn.init.normal_(found.module.head.weight)
    return found


def exported(tmp_path, loaded, labels=("ant", "bee"), **keys) -> Path:
    """Its export, with other keys of its data."""
    data = loaded.data.model_copy(update=keys)
    loss = "mse" if keys else "softmax"
    export_model(loaded.module, loaded.section, tmp_path / "export", data=data, labels=[*labels], loss=loss)
    return tmp_path / "export"


@pytest.mark.parametrize(
    "pixels",
    [
        {},
        {"pixel_order": "patches", "pixel_patch": 8},
        {"interpolation": "bilinear", "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)},
        {"interpolation": "random"},
    ],
)
def test_logits_are_those_of_the_evaluation(folders, tmp_path, pixels):
    source, prepared = folders
    loaded = network(tmp_path, prepared, pixels)
    loader = EvalLoader(loaded.data, 17, Topology(0, 1, 0, 1, torch.device("cpu")))
    with loader.batches() as batches, torch.inference_mode():
        expected = loaded.module(next(batches).inputs).numpy()
    paths = sorted((source / "val").rglob("*.jpg"))  # the order of the split: by class and path
    found = Predictor(loaded).logits([decode_file(str(path), PrepSettings(raw=True)) for path in paths])
    assert np.array_equal(found, expected)
    assert len(np.unique(found.round(4), axis=0)) > 10


@pytest.mark.parametrize(("size", "side"), [(0, "longest"), (150, "longest"), (90, "shortest")])
def test_images_are_shrunk_as_those_of_the_evaluation_were(tmp_path, size, side):
    """By the settings with which the data of its training were prepared, whatever these are by default."""
    numbers = np.random.RandomState(0)
    for i in range(6):
        path = tmp_path / "source" / ("train" if i < 2 else "val") / f"class{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numbers.randint(0, 256, (100 + i, 600, 3)).astype(np.uint8)).save(path)
    prepared = tmp_path / "prepared"
    settings = PrepSettings(max_size=size, side=side, raw=True)
    prepare("image-folder", tmp_path / "source", prepared, settings)
    loaded = network(tmp_path, prepared)
    loader = EvalLoader(loaded.data, 17, Topology(0, 1, 0, 1, torch.device("cpu")))
    with loader.batches() as batches, torch.inference_mode():
        expected = loaded.module(next(batches).inputs).softmax(1).numpy()
    export = {"data": loaded.data, "labels": loaded.classes, "loss": loaded.loss, "prepared": loaded.prepared}
    export_model(loaded.module, loaded.section, tmp_path / "export", **export)
    out = tmp_path / "out.jsonl"
    assert predict(tmp_path / "export", tmp_path / "source/val", "--top", "2", "--to", out) == 0
    found = []
    for line in out.read_text().splitlines():
        by_class = {each["class"]: each["probability"] for each in json.loads(line)["classes"]}
        found.append([by_class[name] for name in loaded.classes])
    assert np.array(found) == pytest.approx(expected, rel=1e-5)
    assert (loaded.prepared.max_size, loaded.prepared.side) == (size, side)


@pytest.mark.parametrize(
    ("targets", "loss", "expected"),
    [
        ("class", "softmax", lambda logits: logits.softmax(1)),
        ("class", "sigmoid", lambda logits: logits.sigmoid()),
        ("multilabel", "sigmoid", lambda logits: logits.sigmoid()),
        ("multilabel", "", lambda logits: logits.sigmoid()),  # whichever loss another tool had
        ("regression", "mse", lambda logits: logits),
    ],
)
def test_what_an_export_predicts_is_what_its_network_did(folders, tmp_path, targets, loss, expected):
    loaded = network(tmp_path, folders[1])
    data = loaded.data.model_copy(update={"targets": targets})
    export_model(loaded.module, loaded.section, tmp_path / "export", data=data, labels=["a", "b"], loss=loss)
    predictor = Predictor(load_network(str(tmp_path / "export")))
    images = [np.random.RandomState(0).randint(0, 256, (40, 30, 3)).astype(np.uint8)]
    logits = torch.from_numpy(predictor.logits(images))
    assert predictor.probabilities(images) == pytest.approx(expected(logits).numpy(), rel=1e-6)
    assert predictor.section.targets == targets


def test_numbers_are_written_with_the_names_of_their_targets(folders, tmp_path, capsys):
    export = exported(tmp_path, network(tmp_path, folders[1]), "xy", targets="regression")
    (tmp_path / "album").mkdir()
    images = [np.random.RandomState(n).randint(0, 256, (40, 30, 3)).astype(np.uint8) for n in range(2)]
    for name, image in zip("ab", images, strict=True):
        Image.fromarray(image).save(tmp_path / f"album/{name}.png")
    expected = Predictor(load_network(str(export))).logits(images)
    words = [export, tmp_path / "album"]
    assert predict(*words) == 0
    (_, *head), *rows = csv.reader(capsys.readouterr().out.splitlines())
    assert [name for name, *_ in rows] == ["a.png", "b.png"]
    assert head == ["x", "y"]
    assert np.array([values for _, *values in rows], float) == pytest.approx(expected, rel=1e-5)
    lines = tmp_path / "out.jsonl"
    assert predict(*words, "--to", lines) == 0
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["image"] for line in found] == ["a.png", "b.png"]
    assert [[*line["targets"]] for line in found] == [["x", "y"]] * 2
    assert np.array([[*line["targets"].values()] for line in found]) == pytest.approx(expected)
    assert predict(*words, "--top", "2") == 2
    assert "--top 2: is for classes; " in capsys.readouterr().err


def test_what_pillow_warns_of_is_not_shown(folders, tmp_path, capsys):
    """It says nothing of what is predicted, and has no name of a file."""
    export = exported(tmp_path, network(tmp_path, folders[1]))
    damaged = b"Exif\0\0II*\0\x08\0\0\0\x05\0"  # five entries, of which there is none
    Image.new("RGB", (40, 30)).save(tmp_path / "a.jpg", exif=damaged)
    with pytest.warns(UserWarning, match="Corrupt EXIF data"), Image.open(tmp_path / "a.jpg") as image:
        image.getexif()
    assert predict(export, tmp_path / "a.jpg") == 0
    assert capsys.readouterr().err == "1 images predicted\n"


def test_names_of_an_export_that_are_no_texts_are_refused(folders, tmp_path):
    export = exported(tmp_path, network(tmp_path, folders[1]))
    config = json.loads((export / "config.json").read_text())
    for names in ([1, 2], {"a": 0}, 3.5):
        (export / "config.json").write_text(json.dumps(config | {"label_names": names}))
        with pytest.raises(InputError, match=r"export: its label_names are no list of texts; export it again"):
            load_network(str(export))


class Payload:
    """What opens a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_strangers_export_brings_no_code_and_other_weights(folders, tmp_path):
    """Whatever config.json says that timm knows of where weights come from, they are those beside it."""
    loaded, ran = network(tmp_path, folders[1]), tmp_path / "ran"
    export = exported(tmp_path, loaded)
    path, evil = export / "config.json", export / "pytorch_model.bin"
    torch.save({"head.weight": Payload(ran)}, evil)
    config = json.loads(path.read_text())
    sources = {"file": str(evil), "url": evil.as_uri(), "hf_hub_id": "a/b", "hf_hub_filename": evil.name}
    sources |= {"source": "timm", "custom_load": True, "state_dict": {}}
    path.write_text(json.dumps(config | {"pretrained_cfg": config["pretrained_cfg"] | sources}))
    same = load_network(str(export)).module.state_dict()["head.weight"]
    assert torch.equal(same, loaded.module.state_dict()["head.weight"])
    for arguments in (
        {"checkpoint_path": str(evil)},
        {"pretrained_cfg_overlay": sources},
        {"pretrained_cfg": sources},
    ):
        path.write_text(json.dumps(config | {"model_args": config["model_args"] | arguments}))
        with pytest.raises(InputError, match="cannot be loaded"):
            load_network(str(export))
    path.write_text(json.dumps(config))
    (export / "model.safetensors").write_bytes(evil.read_bytes())
    with pytest.raises(InputError, match="cannot be loaded"):
        load_network(str(export))
    assert not ran.exists()


@pytest.mark.parametrize("batch", [1, 2, 9])
def test_the_command_names_and_counts_what_it_cannot_read(folders, tmp_path, capsys, batch):
    export, album = exported(tmp_path, network(tmp_path, folders[1])), tmp_path / "album/deep"
    album.mkdir(parents=True)
    image = np.random.RandomState(0).randint(0, 256, (40, 30, 3)).astype(np.uint8)
    Image.fromarray(image).save(album / "a,b.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(image).save(album / "turned.png", exif=turned)
    (album / "bad.jpg").write_bytes(b"\xff\xd8 no image")
    (album / "notes.txt").write_text("none")
    out, lines = tmp_path / "out.csv", tmp_path / "out.jsonl"
    out.write_text("of an earlier call")
    words, sizes = [export, tmp_path / "album", "--batch", batch], []
    watching = register_module_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    try:
        assert predict(*words, "--to", out) == 0
    finally:
        watching.remove()
    assert set(sizes) == ({1} if batch < 9 else {2})  # no network is called with an empty batch, which some refuse
    said = capsys.readouterr().err
    assert f"{out}: 2 images predicted, 1 could not be read" in said
    assert f"{tmp_path / 'album'}: left out 1 file *.txt" in said
    assert f"warning: {album / 'bad.jpg'}: " in said
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert predict(*words, "--top", "9", "--to", lines) == 0
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [each["image"] for each in found] == [row["image"] for row in rows] == ["deep/a,b.png", "deep/turned.png"]
    probabilities = Predictor(load_network(str(export))).probabilities([image, np.rot90(image, -1)])
    for entry, row, probability in zip(found, rows, probabilities, strict=True):
        expected = sorted(zip(probability, ("ant", "bee"), strict=True), reverse=True)
        assert [each["class"] for each in entry["classes"]] == [name for _, name in expected]
        given = [each["probability"] for each in entry["classes"]]
        assert given == pytest.approx([value for value, _ in expected], rel=1e-5)
        assert row == {"image": row["image"], "class": expected[0][1], "probability": f"{given[0]:.6f}"}
    capsys.readouterr()
    assert predict(export, album / "a,b.png", "--top", "5") == 0  # of two classes
    printed = capsys.readouterr().out
    assert printed.startswith('image,class_1,probability_1,class_2,probability_2\n"a,b.png",')


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_files_name_has_its_own_bytes(folders, tmp_path, capsys, suffix):
    """Of classes that are equally likely the first comes first."""
    loaded, album, out = network(tmp_path, folders[1]), tmp_path / "album", tmp_path / f"out.{suffix}"
    torch.nn.init.zeros_(loaded.module.head.weight)
    exported(tmp_path, loaded, ["bee", "ant"])
    album.mkdir()
    for name in ("a.png", os.fsdecode(b"\xff.png")):
        Image.new("RGB", (8, 8)).save(album / name)
    (album / "b.png").write_bytes(b"no image")
    assert predict(tmp_path / "export", album, "--to", out) == 0
    written = out.read_bytes().splitlines()[-1]
    assert written.startswith({"csv": b"\xff.png,bee,0.500000", "jsonl": b'{"image": "\\udcff.png"'}[suffix])
    assert capsys.readouterr().out == ""
    (album / os.fsdecode(b"\xff.png")).unlink()
    (album / "a.png").write_bytes(b"no image")
    before = out.read_bytes()
    assert predict(tmp_path / "export", album, "--to", out) == 2
    assert f"error: {album}: none of its 2 images can be read" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert predict(tmp_path / "export", album / "b.png", "--to", out) == 2
    assert capsys.readouterr().err == f"error: {album}/b.png: is no image that Pillow can read\n"  # of one alone


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), (None, torch.float32)]
)
def test_a_predictor_computes_in_the_recipes_precision(folders, tmp_path, precision, dtype):
    loaded, computed = network(tmp_path, folders[1]), []
    train = loaded.recipe.train.model_copy(update={"precision": precision, "matmul_precision": "high"})
    recipe = loaded.recipe.model_copy(update={"train": train}) if precision else None
    torch.set_float32_matmul_precision("highest")
    try:
        predictor = Predictor(replace(loaded, recipe=recipe))
        assert torch.get_float32_matmul_precision() == ("high" if precision else "highest")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert predictor.inputs([np.zeros((9, 9, 3), np.uint8)]).dtype == dtype
    loaded.module.head.register_forward_hook(lambda module, args, logits: computed.append(logits.dtype))
    assert predictor.logits([np.zeros((9, 9, 3), np.uint8)]).dtype == np.float32
    assert computed == [dtype]
    assert [predictor.class_name(label) for label in range(3)] == [*loaded.classes, "2"]


def test_a_network_of_sentences_is_refused():
    with pytest.raises(InputError, match="reads text"):
        Predictor(load_network("recipes/mnli/mixer.yaml"))
