"""Details of evaluations against torchmetrics and numpy; runs, exports and their classes."""

import hashlib
import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
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
from widemix.evaluation import networks
from widemix.evaluation.assessment import (
    BINS,
    Calibration,
    SelectClasses,
    _details,
    assess,
    assess_network,
    match_classes,
)
from widemix.evaluation.networks import _imagenet_names, load_network
from widemix.evaluation.predict import Predictor
from widemix.evaluation.trained import export_checkpoint
from widemix.formats.manifest import Prepared, manifest_json, read_manifest
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


def test_classes_are_those_that_a_run_was_trained_on_whatever_its_data_are_now(digits, tmp_path, capsys):
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

    state = json.loads((path := checkpoint.find(run).path / "state.json").read_text())
    del state["prepared"]  # as earlier versions wrote it
    path.write_text(json.dumps(state))
    hashes = json.loads((path.parent / "COMPLETE").read_text())
    hashes["state.json"] = hashlib.blake2b(path.read_bytes()).hexdigest()
    (path.parent / "COMPLETE").write_text(json.dumps(hashes))
    assert load_network(str(run)).classes == (*old[1:], "é\udcff")
    assert "prepared anew" not in capsys.readouterr().err
    path.write_text(json.dumps(state | {"data": dict.fromkeys(state["data"], "0")}))
    hashes["state.json"] = hashlib.blake2b(path.read_bytes()).hexdigest()
    (path.parent / "COMPLETE").write_text(json.dumps(hashes))
    assert load_network(str(run)).classes == ()
    assert f"warning: {data}: was prepared anew since {path.parent}" in capsys.readouterr().err


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
    said = [f"{run}: reading the network", f"{tmp_path}/export: writing model.safetensors"]
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
    for world in (1, 2):
        words = ("eval", run, "--details", "--batch", "50", "--json", tmp_path / f"{world}.json")
        codes, output = Forks(be_widemix, *map(str, words), log=tmp_path / "log", environs=group_of(world)).wait()
        assert codes == [0] * world, output
        assert output.count("expected calibration error") == 1
    one, two = (json.loads((tmp_path / f"{world}.json").read_text()) for world in (1, 2))
    assert two.pop("loss") == pytest.approx(one.pop("loss"))
    for entry in one["bins"] + two["bins"]:
        entry["confidence"] = entry["confidence"] and round(entry["confidence"], 6)
    assert (round(one.pop("ece"), 6), one) == (round(two.pop("ece"), 6), two)


def test_timms_networks_have_imagenets_names():
    names = _imagenet_names(timm.create_model("resnet10t", num_classes=1000))
    assert (len(names), names[0], names[999]) == (1000, "n01440764", "n15075141")
    assert _imagenet_names(timm.create_model("resnet10t", num_classes=7)) == ()


def test_outputs_that_are_nan_have_no_details(run):
    network = load_network(str(run))
    assert assess_network(network, details=True).details.ece >= 0
    torch.nn.init.constant_(network.module.head.bias[3:4], torch.nan)
    found = assess_network(network, details=True)
    assert np.isnan(found.metrics["top1"])
    assert found.details is None  # its file would not be JSON


def test_real_labels_against_a_plain_loop(tmp_path, capsys):
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
        ("no", "is not JSON"),
        ("[[3]]", "has label 3; the data has 3 classes"),
        ("[[0], [1]]", "is none of"),
        (json.dumps([[]] * 12), "has no label for any sample"),
    ):
        (tmp_path / "real.json").write_text(text)
        with pytest.raises(InputError, match=error_message):
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
    data = networks.load_network("timm:resnet50.a1_in1k").data
    assert (data.image_size, data.crop_pct) == (288, 1.0)
