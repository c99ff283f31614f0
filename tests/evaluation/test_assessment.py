"""Details of evaluations against torchmetrics and numpy; runs, exports and their classes."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torchmetrics.classification import MulticlassCalibrationError, MulticlassConfusionMatrix

from tests.conftest import ROOT
from tests.forks import Forks, be_widemix, group_of
from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser
from widemix.data.loader import EvalLoader
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.distributed.topology import read_topology
from widemix.errors import InputError
from widemix.evaluation.assessment import (
    BINS,
    Calibration,
    SelectClasses,
    assess,
    assess_network,
    details_of,
    match_classes,
)
from widemix.evaluation.export import export_checkpoint, load_trained
from widemix.evaluation.networks import Network, initial_module, load_network, of_recipe
from widemix.evaluation.predict import Predictor
from widemix.formats.manifest import Prepared, manifest_json, read_manifest
from widemix.models.registry import build_model
from widemix.recipe import load_recipe
from widemix.run import checkpoint
from widemix.run.checkpoint import RetentionPolicy


def test_calibration_and_classes_are_those_of_torchmetrics_and_numpy():
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(700, 6), torch.randint(5, (700,))  # class 5 has no samples
    calibration, confusion = Calibration(), MulticlassConfusionMatrix(6)
    expected = MulticlassCalibrationError(6, n_bins=BINS, norm="l1")
    for part, their in zip(logits.split(300), labels.split(300), strict=True):
        calibration.update(part, their)
        confusion.update(part, their)
        expected.update(part.softmax(1), their)
    found = details_of(confusion.compute(), calibration.compute())
    assert found.ece == pytest.approx(expected.compute().item(), abs=1e-6)
    assert sum(entry["samples"] for entry in found.bins) == 700
    assert found.bins[0] == {"samples": 0, "confidence": None, "accuracy": None}  # none of six classes is below 1/15
    guess, truth = logits.argmax(1).numpy(), labels.numpy()
    for label in range(5):
        assert found.per_class[label] == pytest.approx(100 * (guess[truth == label] == label).mean())
        assert found.confusion[label] == np.bincount(guess[truth == label], minlength=6).tolist()
    assert found.per_class[5] is None


def test_overconfident_bins_do_not_make_up_for_others():
    """Both by 0.3: the error is 0.3, and not their difference."""
    calibration, confusion = Calibration(), MulticlassConfusionMatrix(2)
    for confidence, right in ((0.6, 9), (0.9, 6)):  # of ten samples each
        logits = torch.tensor([confidence, 1 - confidence], dtype=torch.float64).log().expand(10, 2)
        labels = (torch.arange(10) >= right).long()
        calibration.update(logits, labels)
        confusion.update(logits, labels)
    found = details_of(confusion.compute(), calibration.compute())
    assert found.ece == pytest.approx(0.3)
    alike, sure = torch.zeros(2, 3), torch.tensor([[1e3, 0, 0]])
    edges = Calibration()  # a third is the upper edge of the fifth bin, 1 that of the last
    edges.update(torch.cat([alike, sure]), torch.tensor([0, 0, 0]))
    assert edges.samples.tolist() == [0] * 4 + [2] + [0] * 9 + [1]
    used = [(entry["samples"], entry["confidence"], entry["accuracy"]) for entry in found.bins if entry["samples"]]
    assert used == [(10, pytest.approx(0.6), 0.9), (10, pytest.approx(0.9), 0.6)]


def train(run: Path, data: Path, *options: str) -> Path:
    words = ["train", "recipes/digits/s_mixer.yaml", "--run-dir", str(run), "--data.path", str(data)]
    small = ["--train.max_steps", "3", "--model.depth", "1", "--log.tensorboard", "false", "--data.workers", "1"]
    assert run_command(make_parser(), argv=[*words, *small, *options]) == 0
    return run


@pytest.fixture(scope="module")
def run(digits, tmp_path_factory):
    return train(tmp_path_factory.mktemp("assessed") / "run", digits, "--train.ema_decay", "0.9")


def renamed(digits, folder, names, copy=True):
    """The prepared digits as if they had been prepared anew, with other names of classes."""
    shutil.copytree(digits, folder) if copy else folder.mkdir()
    manifest = read_manifest(digits)
    (folder / "manifest.json").write_text(manifest_json(manifest.model_copy(update={"classes": names})))
    return folder


CLASSES = load_recipe("digits/mixer").data


def network_of(data=CLASSES, **parts):
    return Network("net", torch.nn.Identity(), None, data, **parts)


def test_classes_are_those_that_a_run_was_trained_on(digits, tmp_path):
    """After `prep --extend` by a class before the others, every name was another one's."""
    old = tuple(read_manifest(digits).classes)
    data = renamed(digits, tmp_path / "data", ("é\udcff", *old[1:]))  # a name that is not UTF-8 too
    run = train(tmp_path / "run", data)
    before = assess(str(run)).metrics
    shutil.rmtree(data)
    renamed(digits, data, (*old[1:], "é\udcff"))
    assert load_network(str(run)).classes == ("é\udcff", *old[1:])
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


class Expired:
    """A timer whose time is over at once."""

    def __init__(self, _, function, words):
        self.start = lambda: function(*words)

    def cancel(self):
        pass


def test_an_export_has_what_its_run_has(run, tmp_path, monkeypatch, capsys):
    """Names of the classes that it was trained on, and numbers of those beyond them."""
    origin, run = checkpoint.find(run), tmp_path / "run"
    recipe = origin.position.recipe | {"plugins": ["json"]}
    recipe["train"], recipe["data"] = recipe["train"] | {"loss": "sigmoid"}, recipe["data"] | {"crop_pct": 0.75}
    known = Prepared(classes=("a", "b"), max_size=7)
    run.mkdir()
    position = origin.position.model_copy(update={"recipe": recipe, "prepared": known})
    checkpoint.save(run, origin.load(), position, RetentionPolicy(newest=1))
    monkeypatch.setattr("widemix.progress_line.Timer", Expired)  # of seconds, which a small network does not take
    labels, line = export_checkpoint(run, tmp_path / "export", licence="mit")
    said = [f"{run}: reading the network", f"{tmp_path}/export: writing model.safetensors, model.pt2"]
    assert capsys.readouterr().err.splitlines() == said
    assert labels == ["a", "b", *map(str, range(2, 10))]
    assert line == f"import torch; model = torch.export.load('{tmp_path}/export/model.pt2').module()"
    found = load_network(str(tmp_path / "export"))
    assert (found.loss, found.classes, found.data.crop_pct) == ("sigmoid", tuple(labels), 0.75)
    assert found.prepared.max_size == 7
    assert "license: mit" in (tmp_path / "export/README.md").read_text()


DIGITS = tuple("0123456789")
LETTERS = tuple("abcdefghijkl")


@pytest.mark.parametrize(
    ("known", "prepared", "expected"),
    [
        (DIGITS, DIGITS, None),
        (DIGITS, DIGITS[::-1], [*range(9, -1, -1)]),
        (DIGITS, (*DIGITS[:9], "ten"), "has a class 'ten'"),
        ((), DIGITS[::-1], None),
        # As ImageNet-V2 has its classes: by number, sorted as text.
        (LETTERS, ("0", "1", "10", "11", *DIGITS[2:8]), [0, 1, 10, 11, 2, 3, 4, 5, 6, 7]),
        (LETTERS, ("0", "1", "12", *DIGITS[2:9]), "has a class '12'"),
        (("7", "3", "5"), ("3", "7"), [1, 0]),  # its names, whatever their numbers
        (("crane", "duck", "crane"), ("duck", "crane"), "net: has two classes 'crane', so that"),
        (("crane", "duck", "crane"), ("duck", "duck"), "data: has two classes 'duck', so that"),
        (("crane", "duck", "crane"), ("duck",), [1]),
        (("7", "3", "5"), (), None),
        (DIGITS, DIGITS[:3], [0, 1, 2]),  # whichever classes are left out, the first or the last
        (DIGITS, DIGITS[7:], [7, 8, 9]),
    ],
)
def test_classes_are_matched_by_name(known, prepared, expected, digits, tmp_path):
    data = renamed(digits, tmp_path / "data", prepared, copy=False)
    network = network_of(prepared=Prepared(classes=known))
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            match_classes(network, data)
    else:
        assert match_classes(network, data) == expected


def test_of_one_class_there_is_nothing_to_measure(run, digits, tmp_path):
    data, network = renamed(digits, tmp_path / "data", ("0",), copy=False), load_network(str(run))
    with pytest.raises(InputError, match=f"{data}: has one class, '0'"):
        assess_network(network, data)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(SelectClasses(network.module, [3, 0])(x), network.module(x)[:, [3, 0]])


def test_the_command(run, tmp_path, capsys):
    options = ["--details", "--to", str(tmp_path), "--json", str(tmp_path / "eval.json")]
    assert run_command(make_parser(), argv=["eval", str(run), *options]) == 0
    printed, found = capsys.readouterr().out, json.loads((tmp_path / "eval.json").read_text())
    assert f"at step 3 on 360 samples of split 'test' of {found['data']}: top-1 {found['top1']:.2f} %" in printed
    assert {path.name for path in tmp_path.glob("*.png")} == {"confusion.png", "reliability.png"}


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


def test_a_checkpoints_measurement_is_a_line_of_its_run(run, digits, tmp_path, capsys):
    """And none of what another network is; a disk that is full costs a warning."""
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("evaluations.jsonl"))
    found = assess(str(tmp_path / "run"), None, "train", 100).metrics
    assert found == pytest.approx(assess(str(run), split="train").metrics)  # in batches of another size
    found = assess(str(tmp_path / "run"), ema=True)
    lines = [json.loads(line) for line in (tmp_path / "run/evaluations.jsonl").read_text().splitlines()]
    assert [line.pop("time") == pytest.approx(time.time(), abs=600) for line in lines] == [True, True]
    measured = {"step": 3, "data": str(digits)}
    assert lines[1] == {**measured, "ema": True, "split": "test", "samples": 360, **found.metrics}
    assert lines[0].items() >= {**measured, "ema": False, "split": "train", "samples": 1437}.items()
    assert found.metrics != assess(str(run)).metrics
    assert not capsys.readouterr().err
    (tmp_path / "run/evaluations.jsonl").unlink()
    (tmp_path / "run/evaluations.jsonl").mkdir()
    assert assess(str(tmp_path / "run"), ema=True) == found
    assert "warning: " in (said := capsys.readouterr().err)
    assert "evaluations.jsonl: cannot be written to" in said


@pytest.mark.parametrize(
    ("options", "split", "batch", "expected"),
    [
        # Of a recipe its batch size, precision and limit, unless others are asked for.
        ({"train.precision": "bf16", "eval.batch_size": "50", "data.eval_split": "train"}, None, None,
         (777, "high", 1437, 50, torch.bfloat16)),
        ({"train.precision": "bf16"}, "test", 7, (777, "high", 360, 7, torch.bfloat16)),
        (None, None, None, (1800, "highest", 360, 128, torch.float32)),  # without a recipe the usual ones
    ],
)  # fmt: skip
def test_precision_batch_and_limits_are_the_recipes(options, split, batch, expected, digits, system):
    limits, given, begin = [], [], torch.distributed.init_process_group

    def begin_within(*words, timeout, **named):
        limits.append(timeout.total_seconds())
        begin(*words, timeout=timeout, **named)

    system({"torch.distributed.init_process_group": begin_within})
    torch.set_float32_matmul_precision("highest")
    shared = {"train.matmul_precision": "high", "engine.timeout_s": "777", "data.path": str(digits)}
    recipe = load_recipe("digits/mixer", [*(shared | (options or {})).items()])
    network = of_recipe("net", recipe, initial_module(recipe))
    if options is None:
        network = replace(network, recipe=None, section=None)
    network.module.stem.register_forward_hook(lambda module, words, output: given.append((len(output), output.dtype)))
    try:
        found = assess_network(network, None, split, batch)
        precision = torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (limits[0], precision, found.samples, *given[0]) == expected
    assert found.split == (split or recipe.data.eval_split)


@pytest.mark.parametrize("wanted", [{"details": True}, {"real": Path("r")}])
def test_details_and_real_labels_are_for_classes(wanted, digits):
    data = CLASSES.model_copy(update={"path": str(digits), "targets": "regression", "num_classes": 1})
    with pytest.raises(InputError, match=rf"^--{next(iter(wanted))}: is for classes, data\.targets is regression"):
        assess_network(network_of(data), **wanted)


def test_outputs_that_are_nan_have_no_details(run):
    network = load_network(str(run))
    assert assess_network(network, details=True).details.ece >= 0
    torch.nn.init.constant_(network.module.head.bias[3:4], torch.nan)
    found = assess_network(network, details=True)
    assert np.isnan(found.metrics["top1"])
    assert found.details is None  # its file would not be JSON


def test_real_labels_against_a_plain_loop(tmp_path):
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
        ("[[3]]", "has label 3; the data has 3 classes"),
        ("[[0], [1]]", "is none of"),
        (json.dumps([[]] * 12), "has no label for any sample"),
    ):
        (tmp_path / "real.json").write_text(text)
        with pytest.raises(InputError, match=error_message):
            assess_network(network, real=tmp_path / "real.json")
    odd = tmp_path / "odd/val/0/ILSVRC2012_val_00000000.JPEG"
    odd.parent.mkdir(parents=True)
    shutil.copy(path, odd)
    (tmp_path / "odd/val/1").mkdir()
    shutil.copy(path, tmp_path / "odd/val/1/ILSVRC2012_val_00000001.JPEG")
    prepare("image-folder", tmp_path / "odd", tmp_path / "odd_data", PrepSettings())
    (tmp_path / "real.json").write_text("[[0], [1]]")
    with pytest.raises(InputError, match=r"val_00000000\.JPEG is none of .*val_00000001 to ILSVRC2012_val_00000002"):
        assess_network(network, tmp_path / "odd_data", real=tmp_path / "real.json")


@pytest.fixture
def timms(system):
    """timms(config, classes): load the network that timm would make of this pretrained_cfg."""

    def load(config, classes=2, name="timm:one"):
        module = torch.nn.Linear(2, 2)
        module.num_classes, module.pretrained_cfg = classes, config
        system({"timm.create_model": lambda *_, **__: module})
        return load_network(name)

    return load


PLAIN = {"input_size": (3, 8, 8), "mean": (0.5,) * 3, "std": (0.2,) * 3}


def test_preprocessing_that_is_not_of_colour_images_is_refused(timms):
    """Such as timm writes of networks for gray images, with one mean."""
    with pytest.raises(InputError, match=r"^timm:one: mean \(0\.5,\): is no preprocessing of RGB images"):
        timms(PLAIN | {"mean": (0.5,)})


@pytest.mark.parametrize(
    ("mode", "is_warned"), [("squash", True), ("border", True), ("center", False), (None, False)]
)
def test_other_than_centre_crops_are_warned_of(timms, capsys, mode, is_warned):
    timms(PLAIN | ({"crop_mode": mode} if mode else {}))
    assert (f"warning: timm:one: timm evaluates it with crop_mode {mode}" in capsys.readouterr().err) == is_warned


def test_size_and_crop_are_those_of_timms_validation(timms):
    """resnet50.a1_in1k, as timm describes it: trained with 224 pixels, listed with 288."""
    config = timm.models.get_pretrained_cfg("resnet50.a1_in1k").to_dict()
    network = timms(config)
    data = network.data
    assert (data.image_size, data.crop_pct, data.interpolation) == (288, 1.0, "bicubic")
    assert (data.mean, data.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert (data.path, data.num_classes, data.targets, network.loss) == ("", 2, "class", "")
    assert network.classes == ()
    network = timms(config | {"label_names": ["no", "yes"], "interpolation": "bilinear"})
    assert (network.data.interpolation, network.classes) == ("bilinear", ("no", "yes"))


def test_timms_networks_have_imagenets_names_or_their_own(timms):
    names = timms(PLAIN, 1000).classes
    assert (len(names), names[0], names[999]) == (1000, "n01440764", "n15075141")
    assert len(set(timms(PLAIN, 11_821).classes)) == 11_821  # of ImageNet-12k
    own = tuple(f"class {number}" for number in range(1000))  # though it has as many as ImageNet
    predictor = Predictor(timms(PLAIN | {"label_names": [*own]}, 1000))
    assert [predictor.class_name(label) for label in (0, 999, 1000)] == ["class 0", "class 999", "1000"]


def test_a_hubs_usage_is_read_at_its_revision(timms, tmp_path, system):
    (tmp_path / "config.json").write_text(json.dumps({"widemix": {"loss": "sigmoid", "max_size": 50}}))
    asked = []

    def download(*words, revision):
        asked.append((*words, revision))
        return str(tmp_path / "config.json")

    system({"huggingface_hub.hf_hub_download": download})
    for name in ("hf:lab/mixer", "hf:lab/mixer@v2"):
        network = timms(PLAIN, name=name)
        assert (network.loss, network.prepared.max_size) == ("sigmoid", 50)
    assert asked == [("lab/mixer", "config.json", None), ("lab/mixer", "config.json", "v2")]


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
    (tmp_path / "half").mkdir()
    (tmp_path / "half/config.json").write_text("{}")  # an export that was not written to its end
    with pytest.raises(InputError, match="half: holds no complete checkpoint"):
        load_network("half")
    (tmp_path / "digits/mixer").mkdir(parents=True)  # no run, and not what the recipe's short name means
    with pytest.raises(InputError) as raised:
        load_network("digits/mixer")
    assert "give a run, a checkpoint" not in str(raised.value)


def test_averaged_weights_are_those_of_the_checkpoint(run, digits, tmp_path):
    state = checkpoint.find(run).load()
    for ema, weights in ((False, state.model), (True, state.ema)):
        recipe, module = load_trained(run, ema)
        assert recipe == load_network(str(run), ema).recipe
        assert all(torch.equal(value, weights[key]) for key, value in module.state_dict().items())
        export_checkpoint(run, tmp_path / str(ema), ema=ema)
        exported = load_file(tmp_path / f"{ema}/model.safetensors")
        assert all(torch.equal(value, weights[key]) for key, value in exported.items())


def test_a_checkpoint_whose_index_is_no_permutation_is_refused(digits, tmp_path):
    run = train(tmp_path / "run", digits, "--model.permutation", "random")
    state = checkpoint.find(run).load()
    for name, value in state.model.items():
        if name.endswith("index"):
            value[0] = value[1]
    folder = checkpoint.save(run, state, checkpoint.find(run).position, RetentionPolicy(newest=1))
    with pytest.raises(InputError, match=f"^{folder}: .*index is not a permutation"):
        load_trained(run)
