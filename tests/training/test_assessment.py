"""Details of evaluations against torchmetrics and numpy; runs, exports and their classes."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torchmetrics.classification import MulticlassCalibrationError, MulticlassConfusionMatrix

from pipeline.cli.commands import run_command
from pipeline.cli.parser import make_parser
from pipeline.errors import InputError
from pipeline.formats.manifest import manifest_json, read_manifest
from pipeline.training.assessment import BINS, Calibration, SelectClasses, _details, assess, match_classes
from pipeline.training.networks import load_network
from pipeline.training.trained import export_checkpoint


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


@pytest.fixture(scope="module")
def run(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("assessed") / "run"
    words = ["train", "recipes/digits/s_mixer.yaml", "--run-dir", str(folder), "--data.path", str(digits)]
    options = ["--train.max_steps", "3", "--model.depth", "1", "--log.tensorboard", "false", "--data.workers", "1"]
    assert run_command(make_parser(), argv=[*words, *options]) == 0
    return folder


def test_a_run_and_its_export_have_the_same_figures(run, digits, tmp_path):
    of_run = assess(str(run), details=True)
    assert (of_run.step, of_run.samples, of_run.split) == (3, 360, "test")
    assert np.sum(of_run.details.confusion) == 360
    assert np.trace(of_run.details.confusion) / 3.6 == pytest.approx(of_run.figures["top1"])
    export_checkpoint(run, tmp_path / "export")
    of_export = assess(str(tmp_path / "export"), digits, "test")
    assert of_export.figures == pytest.approx(of_run.figures)
    assert of_export.step is None
    assert load_network(str(tmp_path / "export")).classes == tuple(of_run.classes)
    with pytest.raises(InputError, match="give a prepared folder with --data"):
        assess(str(tmp_path / "export"))


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
    assert match_classes(replace(network, classes=()), turned) is None
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(SelectClasses(network.module, [3, 0])(x), network.module(x)[:, [3, 0]])


def test_the_command(run, tmp_path, capsys):
    options = ["--details", "--to", str(tmp_path), "--json", str(tmp_path / "eval.json")]
    assert run_command(make_parser(), argv=["eval", str(run), *options]) == 0
    printed, found = capsys.readouterr().out, json.loads((tmp_path / "eval.json").read_text())
    assert f"at step 3 on 360 samples of split 'test' of {found['data']}: top-1 {found['top1']:.2f} %" in printed
    assert f"expected calibration error {found['ece']:.4f}" in printed
    assert {path.name for path in tmp_path.glob("*.png")} == {"confusion.png", "reliability.png"}
    assert run_command(make_parser(), argv=["eval", str(run), "--to", "x"]) == 2
