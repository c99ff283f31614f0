"""Details of evaluations against torchmetrics and numpy; runs, exports and their classes."""

import json
import shutil
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchmetrics.classification import MulticlassCalibrationError, MulticlassConfusionMatrix

from tests.conftest import ROOT
from tests.forks import Forks, be_widemix, group_of
from widemix.cli.parser import make_parser
from widemix.command_line.commands import run_command
from widemix.data.loader import EvalLoader
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.distributed.topology import read_topology
from widemix.errors import InputError
from widemix.evaluation import assessment, networks, real_labels, trained
from widemix.evaluation.assessment import (
    BINS,
    Assessment,
    Calibration,
    SelectClasses,
    _details,
    assess,
    assess_network,
    evaluate_checkpoint,
    match_classes,
)
from widemix.evaluation.networks import Network, _imagenet_names, initial_module, load_network, of_recipe
from widemix.evaluation.predict import Predictor
from widemix.evaluation.trained import export_checkpoint, load_trained
from widemix.formats.manifest import Prepared, manifest_json, read_manifest
from widemix.models.registry import build_model
from widemix.recipe import load_recipe
from widemix.run import checkpoint


def test_calibration_and_classes_are_those_of_torchmetrics_and_numpy():
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(700, 6), torch.randint(5, (700,))  # class 5 has no samples
    calibration, confusion = Calibration(), MulticlassConfusionMatrix(6)
    expected = MulticlassCalibrationError(6, n_bins=BINS, norm="l1")
    for part, their in zip(logits.split(300), labels.split(300), strict=True):
        calibration.update(part, their)
        confusion.update(part, their)
        expected.update(part.softmax(1), their)
    found = _details(confusion.compute(), calibration.compute())
    assert found.ece == pytest.approx(expected.compute().item(), abs=1e-6)
    assert sum(entry["samples"] for entry in found.bins) == 700
    assert found.bins[0] == {"samples": 0, "confidence": None, "accuracy": None}  # none of six classes is below 1/15
    guess, truth = logits.argmax(1).numpy(), labels.numpy()
    for label in range(5):
        assert found.per_class[label] == pytest.approx(100 * (guess[truth == label] == label).mean())
        assert found.confusion[label] == np.bincount(guess[truth == label], minlength=6).tolist()
    assert found.per_class[5] is None


def test_bins_that_are_too_sure_do_not_make_up_for_those_that_are_not_sure_enough():
    """Both by 0.3: the error is 0.3, and not their difference."""
    calibration, confusion = Calibration(), MulticlassConfusionMatrix(2)
    for confidence, right in ((0.6, 9), (0.9, 6)):  # of ten samples each
        logits = torch.tensor([confidence, 1 - confidence], dtype=torch.float64).log().expand(10, 2)
        labels = (torch.arange(10) >= right).long()
        calibration.update(logits, labels)
        confusion.update(logits, labels)
    found = _details(confusion.compute(), calibration.compute())
    assert found.ece == pytest.approx(0.3)
    alike, sure = torch.zeros(2, 3), torch.tensor([[1e3, 0, 0]])
    edges = Calibration()  # a third is the upper edge of the fifth bin, 1 that of the last
    edges.update(torch.cat([alike, sure]), torch.tensor([0, 0, 0]))
    assert edges.samples.tolist() == [0] * 4 + [2] + [0] * 9 + [1]
    used = [(entry["samples"], entry["confidence"], entry["accuracy"]) for entry in found.bins if entry["samples"]]
    assert used == [(10, pytest.approx(0.6), 0.9), (10, pytest.approx(0.9), 0.6)]


@pytest.fixture(scope="module")
def run(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("assessed") / "run"
    words = ["train", "recipes/digits/s_mixer.yaml", "--run-dir", str(folder), "--data.path", str(digits)]
    options = ["--train.max_steps", "3", "--model.depth", "1", "--log.tensorboard", "false", "--data.workers", "1"]
    assert run_command(make_parser(), argv=[*words, *options]) == 0
    return folder


def renamed(digits, folder, names):
    """The prepared digits as if they had been prepared anew, with other names of classes."""
    shutil.copytree(digits, folder)
    manifest = read_manifest(folder)
    (folder / "manifest.json").write_text(manifest_json(manifest.model_copy(update={"classes": names})))
    return folder


def test_classes_are_those_that_a_run_was_trained_on_whatever_its_data_are_now(digits, tmp_path):
    """After `prep --extend` by a class before the others, every name was another one's."""
    old = tuple(read_manifest(digits).classes)
    data = renamed(digits, tmp_path / "data", ("é\udcff", *old[1:]))  # a name that is not UTF-8 too
    run = tmp_path / "run"
    words = ["train", "recipes/digits/s_mixer.yaml", "--run-dir", str(run), "--data.path", str(data)]
    options = ["--train.max_steps", "2", "--model.depth", "1", "--log.tensorboard", "false", "--data.workers", "1"]
    assert run_command(make_parser(), argv=[*words, *options]) == 0
    before = assess(str(run)).metrics
    shutil.rmtree(data)
    renamed(digits, data, (*old[1:], "é\udcff"))
    assert load_network(str(run)).classes == ("é\udcff", *old[1:])
    export_checkpoint(run, tmp_path / "export")
    assert load_network(str(tmp_path / "export")).classes == ("é\udcff", *old[1:])
    moved = assess(str(run)).metrics  # each label is now the class before
    assert moved["loss"] != pytest.approx(before["loss"])
    labels = [*range(1, 10), 0]
    with EvalLoader(load_network(str(run)).data, 360, read_topology()).batches() as batches, torch.no_grad():
        batch = next(batches)
        logits = load_network(str(run)).module(batch.inputs)[:, labels]
    assert moved["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, batch.targets).item(), rel=1e-5)


def test_a_run_and_its_export_have_the_same_figures(run, digits, tmp_path):
    of_run = assess(str(run), details=True)
    assert (of_run.step, of_run.samples, of_run.split) == (3, 360, "test")
    assert np.sum(of_run.details.confusion) == 360
    assert np.trace(of_run.details.confusion) / 3.6 == pytest.approx(of_run.metrics["top1"])
    export_checkpoint(run, tmp_path / "export")
    of_export = assess(str(tmp_path / "export"), digits, "test")
    assert of_export.metrics == pytest.approx(of_run.metrics)
    assert of_export.step is None
    assert load_network(str(tmp_path / "export")).classes == tuple(of_run.classes)
    with pytest.raises(InputError, match="give a prepared folder with --data"):
        assess(str(tmp_path / "export"))


def test_an_export_says_what_takes_long(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("widemix.tally.Timer", Expired)
    assert run_command(make_parser(), argv=["export", str(run), "--to", str(tmp_path / "export")]) == 0
    said = [f"{run}: reading the network", f"{tmp_path}/export: writing model.safetensors, model.pt2"]
    assert capsys.readouterr().err.splitlines() == said


class Expired:
    """A timer whose time is over at once."""

    def __init__(self, _, function, words):
        self.start = lambda: function(*words)

    def cancel(self):
        pass


def test_classes_are_matched_by_name(run, digits, tmp_path):
    network = load_network(str(run))
    assert match_classes(network, digits) is None
    manifest = read_manifest(digits)
    turned = tmp_path / "turned"
    turned.mkdir()

    def write(classes):
        (turned / "manifest.json").write_text(manifest_json(manifest.model_copy(update={"classes": classes})))

    write(manifest.classes[::-1])
    assert match_classes(network, turned) == list(range(9, -1, -1))
    write((*manifest.classes[:9], "ten"))
    with pytest.raises(InputError, match="has a class 'ten'"):
        match_classes(network, turned)
    assert match_classes(replace(network, prepared=Prepared()), turned) is None
    named = replace(network, prepared=Prepared(classes=tuple("abcdefghijkl")))
    # as ImageNet-V2 has its classes: by number, sorted as text
    write(("0", "1", "10", "11", "2", "3", "4", "5", "6", "7"))
    assert match_classes(named, turned) == [0, 1, 10, 11, 2, 3, 4, 5, 6, 7]
    write(("0", "1", "12", "2", "3", "4", "5", "6", "7", "8"))
    with pytest.raises(InputError, match="has a class '12'"):
        match_classes(named, turned)
    cranes = replace(network, prepared=Prepared(classes=("crane", "duck", "crane")))
    for classes, owner in ((("duck", "crane"), network.name), (("duck", "duck"), turned)):
        write(classes)
        with pytest.raises(InputError, match=rf"{owner}: has two classes '{classes[1]}', so that"):
            match_classes(cranes, turned)
    write(("duck",))
    assert match_classes(cranes, turned) == [1]
    own = replace(network, prepared=Prepared(classes=("7", "3", "5")))
    write(("3", "7"))  # its names, whatever their numbers
    assert match_classes(own, turned) == [1, 0]
    write(())
    assert match_classes(own, turned) is None
    write(manifest.classes[:3])  # whichever classes are left out, the first or the last
    assert match_classes(network, turned) == [0, 1, 2]
    write(manifest.classes[7:])
    assert match_classes(network, turned) == [7, 8, 9]
    write(manifest.classes[:1])
    with pytest.raises(InputError, match=f"{turned}: has one class, '0'"):
        assess_network(network, turned)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(SelectClasses(network.module, [3, 0])(x), network.module(x)[:, [3, 0]])


def test_the_command(run, tmp_path, capsys):
    options = ["--details", "--to", str(tmp_path), "--json", str(tmp_path / "eval.json")]
    assert run_command(make_parser(), argv=["eval", str(run), *options]) == 0
    printed, found = capsys.readouterr().out, json.loads((tmp_path / "eval.json").read_text())
    assert f"at step 3 on 360 samples of split 'test' of {found['data']}: top-1 {found['top1']:.2f} %" in printed
    assert f"expected calibration error {found['ece']:.4f}" in printed
    lowest = sorted((accuracy, digit) for digit, accuracy in enumerate(found["per_class"]))[:3]
    named = ", ".join(f"{digit} {accuracy:.2f} %" for accuracy, digit in lowest)
    assert f"lowest top-1: {named}\n" in printed
    assert {path.name for path in tmp_path.glob("*.png")} == {"confusion.png", "reliability.png"}
    assert run_command(make_parser(), argv=["eval", str(run), "--to", "x"]) == 2


def test_figures_go_to_tensorboard_alone_where_no_folder_is_named(run, tmp_path):
    (tmp_path / "recipe.yaml").touch()
    assert run_command(make_parser(), argv=["eval", str(run), "--details", "--tensorboard", str(tmp_path)]) == 0
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert sorted(board.Tags()["images"]) == ["analysis/confusion", "analysis/reliability"]
    assert not list(tmp_path.glob("*.png"))


def test_details_that_are_not_plotted_need_no_plots(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "widemix.analysis.evaluation", None)
    assert run_command(make_parser(), argv=["eval", str(run), "--details"]) == 0
    assert "expected calibration error" in capsys.readouterr().out


def test_two_ranks_have_the_details_of_one(run, tmp_path):
    record = run / "evaluations.jsonl"
    before = record.read_text().count("\n") if record.exists() else 0
    for world in (1, 2):
        words = ("eval", run, "--details", "--batch", "50", "--json", tmp_path / f"{world}.json")
        codes, output = Forks(be_widemix, *map(str, words), log=tmp_path / "log", environs=group_of(world)).wait()
        assert codes == [0] * world, output
        assert output.count("expected calibration error") == 1
        assert record.read_text().count("\n") == before + world  # of each call one
    one, two = (json.loads((tmp_path / f"{world}.json").read_text()) for world in (1, 2))
    assert two.pop("loss") == pytest.approx(one.pop("loss"))
    for entry in one["bins"] + two["bins"]:
        entry["confidence"] = entry["confidence"] and round(entry["confidence"], 6)
    assert (round(one.pop("ece"), 6), one) == (round(two.pop("ece"), 6), two)


CLASSES = load_recipe("digits/mixer").data


def network_of(data=CLASSES, **parts):
    return Network("net", torch.nn.Identity(), None, data, **parts)


def test_a_checkpoints_measurement_is_a_line_of_its_run_and_none_of_others_is(tmp_path, monkeypatch, capsys):
    found = Assessment("net", "data/folder", "val", 360, 7, {"top1": 12.5, "loss": 2.0}, [])
    lines, given = [], []
    monkeypatch.setattr(assessment, "load_network", lambda *words: given.append(words) or "network")
    monkeypatch.setattr(assessment, "assess_network", lambda *words: given.append(words) or found)
    monkeypatch.setattr(checkpoint, "find", lambda path: SimpleNamespace(path=path / "00000007"))
    monkeypatch.setattr(time, "time", lambda: 99.5)
    monkeypatch.setattr(assessment, "record_evaluation", lambda *words: lines.append(words) or "the disk is full")
    assert assess("run", Path("d"), "s", 5, ema=True, details=True, real=Path("r")) is found
    assert given == [("run", True), ("network", Path("d"), "s", 5, True, Path("r"))]
    measured = {"step": 7, "ema": True, "data": "data/folder", "split": "val", "samples": 360, "time": 99.5}
    assert lines == [(Path("run/00000007"), {**measured, "top1": 12.5, "loss": 2.0})]
    assert capsys.readouterr().err == "warning: the disk is full\n"
    monkeypatch.setattr(assessment, "record_evaluation", lambda *words: lines.append(words))
    assert evaluate_checkpoint(Path("run"), None, "s", 6, ema=True) == found.metrics
    assert given[2:] == [("run", True), ("network", None, "s", 6, False, None)]
    assert lines[1][1]["ema"]
    assert not capsys.readouterr().err
    found = replace(found, step=None)  # no run's
    assert assess("export") is found
    assert given[4] == ("export", False)
    assert len(lines) == 2


def test_precision_batch_and_limits_are_the_recipes_and_usual_ones_without_a_recipe(monkeypatch, tmp_path):
    seen: list[object] = []

    class Loader:
        source = SimpleNamespace(file=SimpleNamespace(path="split.beton"))

        def __init__(self, section, batch, topology, dtype):
            seen.append((section.path, section.eval_split, section.num_classes, batch, dtype))

        def __len__(self):
            return 9

    def evaluated(module, precision, loader, number, observe):
        seen.append((precision, number))
        return {"loss": 1.0}

    def group(topology, seconds):
        seen.append(seconds)
        return nullcontext()

    monkeypatch.setattr(assessment, "EvalLoader", Loader)
    monkeypatch.setattr(assessment, "check_model", lambda section, loader: seen.append((section, type(loader))))
    monkeypatch.setattr(assessment, "process_group", group)
    monkeypatch.setattr(assessment, "set_torch_threads", lambda topology: seen.append("threads"))
    monkeypatch.setattr(assessment, "set_matmul_precision", seen.append)
    monkeypatch.setattr(assessment, "autocast", lambda device, dtype: dtype)
    monkeypatch.setattr(assessment, "evaluate", evaluated)
    monkeypatch.setattr(assessment, "read_manifest", lambda folder: SimpleNamespace(classes=()))
    options = {"train.precision": "bf16", "train.matmul_precision": "high", "eval.batch_size": "50"}
    options |= {"engine.timeout_s": "777", "data.path": "own", "data.eval_split": "val"}
    recipe = load_recipe("digits/mixer", [*options.items()])
    own = network_of(recipe.data, recipe=recipe)
    found = assess_network(own)
    loaded = ("own", "val", 10, 50, torch.bfloat16)
    assert seen == [777, "threads", "high", loaded, (torch.bfloat16, 10)]
    assert (found.data, found.split, found.samples) == ("own", "val", 9)
    seen.clear()
    assess_network(replace(own, section=recipe.model), Path("other"), "train", 7)
    loaded = ("other", "train", 10, 7, torch.bfloat16)
    assert seen == [777, "threads", "high", loaded, (recipe.model, Loader), (torch.bfloat16, 10)]
    seen.clear()
    assess_network(network_of(CLASSES.model_copy(update={"path": "own"})))
    assert seen == [1800, "threads", ("own", "test", 10, 128, torch.float32), (torch.float32, 10)]
    one = CLASSES.model_copy(update={"path": "own", "num_classes": 1, "targets": "regression"})
    assert assess_network(network_of(one)).samples == 9
    for option, wanted in (("details", {"details": True}), ("real", {"real": Path("real.json")})):
        with pytest.raises(InputError, match=rf"^--{option}: is for classes, data\.targets is regression"):
            assess_network(network_of(one), **wanted)
    with pytest.raises(InputError, match=r"^--batch 0: must be at least 1"):
        assess_network(own, batch=0)
    assess_network(own, batch=1)


def test_timms_networks_have_imagenets_names():
    names = _imagenet_names(timm.create_model("resnet10t", num_classes=1000))
    assert (len(names), names[0], names[999]) == (1000, "n01440764", "n15075141")
    assert _imagenet_names(timm.create_model("resnet10t", num_classes=7)) == ()
    larger = torch.nn.Identity()
    larger.num_classes = 11_821  # of ImageNet-12k
    assert len(set(_imagenet_names(larger))) == 11_821


def test_outputs_that_are_nan_have_no_details(run):
    network = load_network(str(run))
    assert assess_network(network, details=True).details.ece >= 0
    torch.nn.init.constant_(network.module.head.bias[3:4], torch.nan)
    found = assess_network(network, details=True)
    assert np.isnan(found.metrics["top1"])
    assert found.details is None  # its file would not be JSON


def test_real_labels_against_a_plain_loop(tmp_path, monkeypatch):
    numbers = np.random.RandomState(0)
    for image in numbers.permutation(12):
        path = tmp_path / f"source/val/{image % 3}/ILSVRC2012_val_{image + 1:08d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numbers.randint(0, 256, (8, 8, 3)).astype(np.uint8)).save(path)
    prepare("image-folder", tmp_path / "source", tmp_path / "data", PrepSettings())
    labels = [[0], [1, 2], [], [2], [0, 1, 2], [], [1], [0, 2], [2], [1], [0], [0, 1]]
    (tmp_path / "real.json").write_text(json.dumps(labels))
    (tmp_path / "recipe.yaml").write_text(
        json.dumps(
            {
                "extends": str(ROOT / "recipes/digits/s_mixer.yaml"),
                "data": {"path": str(tmp_path / "data"), "num_classes": 3, "eval_split": "val"},
                "train": {"seed": 1},
            }
        )
    )
    network = load_network(str(tmp_path / "recipe.yaml"))
    torch.nn.init.normal_(network.module.head.weight)
    found = assess_network(network, batch=5, real=tmp_path / "real.json")
    predictor, correct = Predictor(network), 0
    for image, own in enumerate(labels):
        path = tmp_path / f"source/val/{image % 3}/ILSVRC2012_val_{image + 1:08d}.JPEG"
        correct += predictor.logits([np.asarray(Image.open(path))]).argmax() in own
    assert found.metrics["real_samples"] == 10
    assert found.metrics["real_top1"] == pytest.approx(10 * correct)
    assert 0 < correct < 10
    assert f"ReaL top-1 {10 * correct:.2f} % of 10 samples with labels" in found.sentence()
    torch.nn.init.constant_(network.module.head.bias, torch.nan)
    assert np.isnan(assess_network(network, real=tmp_path / "real.json").metrics["real_top1"])
    for text, error_message in (
        ("{}", "must be a list with a list of labels"),
        ("[[0], [true]]", "must be a list with a list of labels"),
        ("[[0], [-1]]", "must be a list with a list of labels"),
        ("[[0], 1]", "must be a list with a list of labels"),
        ("no", "is not JSON"),
        ("[[3]]", "has label 3; the data has 3 classes"),
        ("[[0], [1]]", "is none of"),
        (json.dumps([[]] * 12), "has no label for any sample"),
    ):
        (tmp_path / "real.json").write_text(text)
        with pytest.raises(InputError, match=error_message):
            assess_network(network, real=tmp_path / "real.json")
    with pytest.raises(InputError, match=r"none\.json: cannot be read \(No such file or directory\)"):
        assess_network(network, real=tmp_path / "none.json")
    (tmp_path / "real.json").write_text(json.dumps(labels))
    monkeypatch.setattr(real_labels, "read_sources", lambda beton: {"a/ILSVRC2012_val_00000000.JPEG": (0, "")})
    with pytest.raises(InputError, match=r"val_00000000\.JPEG is none of .*val_00000001 to ILSVRC2012_val_00000012"):
        assess_network(network, real=tmp_path / "real.json")


def test_an_export_whose_preprocessing_is_not_that_of_colour_images_is_refused_in_one_line(monkeypatch):
    """Such as timm writes of networks for gray images, with one mean."""
    module = torch.nn.Linear(2, 2)
    module.num_classes, module.pretrained_cfg = 2, {"input_size": (1, 8, 8), "mean": (0.5,), "std": (0.2, 0.2, 0.2)}
    monkeypatch.setattr(networks, "load_pretrained", lambda *_: module)
    with pytest.raises(InputError, match=r"^timm:gray: mean \(0\.5,\): is no preprocessing of RGB images"):
        networks.load_network("timm:gray")


@pytest.mark.parametrize(
    ("mode", "is_warned"), [("squash", True), ("border", True), ("center", False), (None, False)]
)
def test_a_network_that_timm_evaluates_on_other_than_centre_crops_is_warned_of(monkeypatch, capsys, mode, is_warned):
    module = torch.nn.Linear(2, 2)
    module.num_classes, module.pretrained_cfg = 2, {"input_size": (3, 8, 8), "mean": (0.5,) * 3, "std": (0.2,) * 3}
    if mode:
        module.pretrained_cfg["crop_mode"] = mode
    monkeypatch.setattr(networks, "load_pretrained", lambda *_: module)
    networks.load_network("timm:one")
    assert (f"warning: timm:one: timm evaluates it with crop_mode {mode}" in capsys.readouterr().err) == is_warned


def test_size_and_crop_are_those_of_timms_validation(monkeypatch):
    """resnet50.a1_in1k, as timm describes it: trained with 224 pixels, listed with 288."""
    module = torch.nn.Linear(2, 2)
    module.num_classes, module.pretrained_cfg = 2, timm.models.get_pretrained_cfg("resnet50.a1_in1k").to_dict()
    monkeypatch.setattr(networks, "load_pretrained", lambda *_: module)
    network = networks.load_network("timm:resnet50.a1_in1k")
    data = network.data
    assert (data.image_size, data.crop_pct, data.interpolation) == (288, 1.0, "bicubic")
    assert (data.mean, data.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert (data.path, data.num_classes, data.targets, network.loss) == ("", 2, "class", "")
    assert network.classes == ()
    module.pretrained_cfg |= {"label_names": ["no", "yes"], "interpolation": "bilinear"}
    network = networks.load_network("timm:resnet50.a1_in1k")
    assert (network.data.interpolation, network.classes) == ("bilinear", ("no", "yes"))
    module.num_classes, names = 1000, [f"class {number}" for number in range(1000)]
    module.pretrained_cfg |= {"label_names": names}  # its own, though it has as many as ImageNet
    network = networks.load_network("timm:resnet50.a1_in1k")
    assert network.classes == tuple(names)
    predictor = Predictor(network)
    assert [predictor.class_name(label) for label in (0, 999, 1000)] == ["class 0", "class 999", "1000"]


def test_a_recipe_is_its_network_at_the_start(digits, tmp_path):
    """Of its seed, its head's bias and the weights that it starts from."""
    options = [("data.path", str(digits)), ("model.depth", "1"), ("train.loss", "sigmoid"), ("train.head_bias", "-3")]
    recipe = load_recipe("digits/mixer", [*options, ("train.seed", "5")])
    module = initial_module(recipe)
    torch.manual_seed(5)
    plain = build_model(recipe.model, 8, 10)
    assert torch.equal(module.stem.proj.weight, plain.stem.proj.weight)
    assert module.head.bias.tolist() == [-3] * 10
    torch.nn.init.normal_(plain.head.weight)
    save_file(plain.state_dict(), tmp_path / "start.safetensors")
    for reset in (False, True):
        start = {"init_from": str(tmp_path / "start.safetensors"), "reset_head": reset, "seed": 6}
        other = recipe.model_copy(update={"train": recipe.train.model_copy(update=start)})
        module = initial_module(other)
        assert torch.equal(module.stem.proj.weight, plain.stem.proj.weight)
        assert torch.equal(module.head.weight, plain.head.weight) != reset
    network = of_recipe("net", recipe, module)
    assert (network.loss, network.prepared.classes) == ("sigmoid", tuple(map(str, range(10))))
    assert not network.module.training
    elsewhere = recipe.model_copy(update={"data": recipe.data.model_copy(update={"path": "none"})})
    assert of_recipe("net", elsewhere, module).prepared == Prepared()
    known = Prepared(classes=("a", "b"))
    assert of_recipe("net", recipe, module, known).prepared is known


def test_a_name_is_a_file_before_it_is_a_recipes(run, digits, tmp_path, monkeypatch):
    for suffix in ("yml", "yaml"):
        (tmp_path / f"own.{suffix}").write_text(f"extends: {ROOT / 'recipes/digits/s_mixer.yaml'}\n")
        assert load_network(str(tmp_path / f"own.{suffix}")).section.kind == "s_mixer"
    counted = f"extends: {ROOT / 'recipes/digits/s_mixer.yaml'}\ndata: {{path: {digits}, num_classes: 0}}\n"
    (tmp_path / "counted.yaml").write_text(counted)
    assert load_network(str(tmp_path / "counted.yaml")).data.num_classes == 10  # of the prepared data
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"nowhere.*; give a run, a checkpoint, a folder of `widemix export`"):
        load_network("nowhere")
    (tmp_path / "half").mkdir()
    (tmp_path / "half/config.json").write_text("{}")  # an export that was not written to its end
    with pytest.raises(InputError, match="half: holds no complete checkpoint"):
        load_network("half")
    (tmp_path / "digits/mixer").mkdir(parents=True)  # no run, and not what the recipe's short name means
    with pytest.raises(InputError) as raised:
        load_network("digits/mixer")
    assert "give a run, a checkpoint" not in str(raised.value)
    for name in (run, run / "checkpoints/00000003"):
        with pytest.raises(InputError, match=r"has no averaged weights; its recipe sets no train\.ema_decay"):
            load_network(str(name), ema=True)
    with pytest.raises(InputError, match=r"^--ema: is for runs and checkpoints; timm:one has one set of weights"):
        load_network("timm:one", ema=True)


def test_a_hubs_usage_is_read_at_its_revision(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"widemix": {"loss": "sigmoid", "max_size": 50}}))
    asked = []

    def download(*words, revision):
        asked.append((*words, revision))
        return str(tmp_path / "config.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert networks._usage("hf:lab/mixer", None).loss == "sigmoid"
    assert networks._usage("hf:lab/mixer@v2", None).max_size == 50
    assert asked == [("lab/mixer", "config.json", None), ("lab/mixer", "config.json", "v2")]
    assert networks._usage("timm:mixer", None).loss == ""


def test_averaged_weights_are_those_of_the_checkpoint(run, monkeypatch):
    origin = checkpoint.find(run)
    recipe, module = load_trained(run)
    average = {name: value + 1 for name, value in module.state_dict().items()}
    state = SimpleNamespace(model=module.state_dict(), ema=average)
    kept = SimpleNamespace(path=origin.path, position=origin.position, load=lambda: state)
    monkeypatch.setattr(checkpoint, "find", lambda path: kept)
    for ema, expected in ((False, state.model), (True, average)):
        found, module = load_trained(run, ema)
        assert found == recipe
        assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())

    def refuse(module):
        raise ValueError("index is not a permutation")

    monkeypatch.setattr(trained, "check_indices", refuse)
    with pytest.raises(InputError, match=f"^{origin.path}: index is not a permutation"):
        load_trained(run)


def test_an_export_gets_what_the_run_has(run, tmp_path, monkeypatch):
    prepared, given, loaded = Prepared(classes=("a", "b"), max_size=7), [], []
    position = SimpleNamespace(prepared=prepared)
    monkeypatch.setattr(checkpoint, "find", lambda path: SimpleNamespace(path=path, position=position))
    recipe = load_recipe("digits/mixer", [("train.loss", "sigmoid"), ("data.num_classes", "4")])
    recipe = recipe.model_copy(update={"plugins": ("json",)})
    monkeypatch.setattr(trained, "check_packages", lambda: given.append("packages"))
    monkeypatch.setattr(trained, "load_trained", lambda *words: loaded.append(words) or (recipe, "module"))
    monkeypatch.setattr(trained, "model_card", lambda *words: words)
    monkeypatch.setattr(trained, "export_model", lambda *words, **named: given.append((words, named)))
    labels, line = export_checkpoint(run, tmp_path / "out", ema=True, onnx=True, licence="mit")
    assert loaded == [(run, True)]
    assert labels == ["a", "b", "2", "3"]
    assert line.startswith("import widemix, json, timm; model = timm.create_model(")
    packages, (words, named) = given
    assert packages == "packages"  # before anything is read
    assert words == ("module", recipe.model, tmp_path / "out")
    card = named.pop("card").args
    assert card[1:] == (recipe, "out", True, "mit")
    expected = {"data": recipe.data, "labels": labels, "loss": "sigmoid", "prepared": prepared, "onnx": True}
    assert named == expected
    recipe = load_recipe("digits/mixer", [("data.pixel_order", "patches"), ("data.pixel_patch", "4")])
    with pytest.raises(InputError, match=r"was trained with data\.pixel_order patches"):
        export_checkpoint(run, tmp_path / "other")
    assert len(given) == 2
