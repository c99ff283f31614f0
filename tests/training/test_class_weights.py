"""Training on unequal classes: the loss is a plain loop's, the metrics are scikit-learn's, and users are told."""

import json
import sys

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score
from sklearn.utils.class_weight import compute_class_weight
from torch.nn import BCEWithLogitsLoss, CrossEntropyLoss

import widemix
from tests.conftest import Fork, train_lines
from tests.unequal import TINY, options_of, png, prepare_unequal
from widemix.data.loader import EvalLoader, TrainLoader
from widemix.distributed.topology import Topology
from widemix.evaluation.export import load_trained
from widemix.recipe import load_recipe
from widemix.recipe.losses import LOSSES

ALONE = Topology(0, 1, 0, 1, torch.device("cpu"))
COUNTS = {"ant": 40, "bee": 24, "cow": 12, "dog": 2}
LABELS = np.repeat([*COUNTS], [*COUNTS.values()])
SMALL = TINY | {
    "optim.name": "sgd",
    "optim.lr": "0.1",
    "optim.momentum": "0",
    "optim.weight_decay": "0",
    "optim.clip_grad": "null",
    "schedule.min_lr": "0",
    "train.global_batch": "32",
    "train.epochs": "2",
    "log.every": "1",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare_unequal(tmp_path_factory.mktemp("unequal"), {"train": COUNTS, "val": COUNTS | {"dog": 3}})


def recipe_of(folder, **keys):
    own = {name: str(value) for name, value in keys.items()}
    return load_recipe("base/own_images", [*(SMALL | {"data.path": str(folder)} | own).items()])


def weights_of(rule):
    """Of the four classes in their order: scikit-learn's, or by the formula of the paper."""
    counts = np.array([*COUNTS.values()])
    if rule == "inverse":
        return compute_class_weight("balanced", classes=np.array([*COUNTS]), y=LABELS)
    if rule == "{dog: 9, ant: 0.5}":
        return np.array([0.5, 1, 1, 9])
    raw = counts**-0.5 if rule == "sqrt" else 1 / ((1 - 0.999**counts) / (1 - 0.999))
    return raw / raw[np.repeat(range(4), counts)].mean()


def plain_losses(recipe, criterion, classes=4):
    """Of SGD in a plain loop, on the batches of the loader."""
    torch.manual_seed(recipe.train.seed)
    section = recipe.data.model_copy(update={"num_classes": classes})
    model = widemix.build_model(recipe.model_copy(update={"data": section}))
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    loader = TrainLoader(section, recipe.augment, recipe.train, ALONE)
    for epoch in range(2):
        with loader.batches(epoch) as batches:
            for batch in batches:
                loss = criterion(model(batch.inputs), batch.targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    return losses


def weighted_bce(weights):
    bce = BCEWithLogitsLoss(pos_weight=weights, reduction="none")
    return lambda x, y: bce(x, y).sum(1).mean()


@pytest.mark.parametrize("rule", ["inverse", "sqrt", "effective", "{dog: 9, ant: 0.5}"])
@pytest.mark.parametrize(("loss", "mixed"), [("softmax", False), ("softmax", True), ("sigmoid", True)])
def test_losses_are_those_of_a_plain_weighted_loop(folder, tmp_path, rule, loss, mixed):
    keys = {"augment.mixup": 0.8 * mixed, "augment.cutmix": float(mixed), "augment.smoothing": 0.1 * mixed}
    recipe = recipe_of(folder, **keys, **{"train.class_weights": rule, "train.loss": loss})
    weights = torch.from_numpy(weights_of(rule)).float()
    criterion = CrossEntropyLoss(weight=weights) if loss == "softmax" else weighted_bce(weights)
    widemix.train(recipe, tmp_path / "run")
    expected = plain_losses(recipe, criterion)
    assert [line["loss"] for line in train_lines(tmp_path / "run")] == pytest.approx(expected, rel=1e-5)
    assert plain_losses(recipe, LOSSES[loss].compute) != pytest.approx(expected, rel=1e-4)


def test_several_ranks_have_the_losses_of_one(folder, tmp_path, train):
    """Of soft targets: what torch divides by is the batch, not the weights that a rank happens to have."""
    keys = SMALL | {"data.path": folder, "train.class_weights": "inverse", "augment.mixup": "0.8"}
    for run, world in (("one", 1), ("two", 2)):
        code, said = train(run, *options_of(keys), recipe="base/own_images", world=world).wait()
        assert code == 0, said
    one, two = ([line["loss"] for line in train_lines(tmp_path / run)] for run in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5)


def test_multilabel_weights_are_by_the_samples_that_have_a_target(folder, tmp_path):
    """The three targets are of 78, 26 and 4 samples; weights of positives, as torch's pos_weight."""
    rows = [(png(number), (1.0, float(number % 3 == 0), float(number % 20 == 0))) for number in range(78)]
    widemix.prepare({"train": rows, "val": rows}, tmp_path / "data", targets="a,b,c", processes=1)
    keys = {"data.targets": "multilabel", "train.loss": "sigmoid", "augment.smoothing": 0, "train.keep_best": "map"}
    recipe = recipe_of(tmp_path / "data", **keys, **{"train.class_weights": "inverse", "train.max_steps": 1})
    widemix.train(recipe, tmp_path / "run")
    counts = np.array([78, 26, 4])
    weights = torch.tensor(counts.sum() / 3 / counts, dtype=torch.float32)
    expected, *_ = plain_losses(recipe, weighted_bce(weights), classes=3)
    assert train_lines(tmp_path / "run")[0]["loss"] == pytest.approx(expected, rel=1e-5)


PLUGIN = """
from widemix.plugins import LossSpec, register_loss
from widemix.recipe.losses import softmax_loss

def adjusted(logits, targets, counts, weights=None):
    return softmax_loss(logits.float() + (counts / counts.sum()).log(), targets, weights)

register_loss("adjusted", LossSpec(adjusted, "logit adjustment (Menon et al. 2021)", takes=("counts", "weights")))
"""


def test_a_plugins_loss_is_given_the_counts(folder, tmp_path, monkeypatch):
    (tmp_path / "counting.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "recipe.yaml"
    file.write_text("extends: base/own_images\nplugins: [counting]\n")
    keys = SMALL | {"data.path": str(folder), "train.max_steps": "1"}
    try:
        losses = {}
        for rule in ("null", "inverse"):
            recipe = load_recipe(file, [*keys.items(), ("train.loss", "adjusted"), ("train.class_weights", rule)])
            widemix.train(recipe, tmp_path / rule)
            losses[rule] = train_lines(tmp_path / rule)[0]["loss"]
        prior = torch.tensor([*COUNTS.values()]).div(78).log()
        for rule, weights in (("null", None), ("inverse", torch.from_numpy(weights_of("inverse")).float())):
            plain = CrossEntropyLoss(weight=weights)
            expected, *_ = plain_losses(recipe, lambda x, y, plain=plain: plain(x + prior, y))
            assert losses[rule] == pytest.approx(expected, rel=1e-5)
        assert LOSSES["adjusted"].build()(torch.zeros(2, 4), torch.eye(4)[:2]).item() == pytest.approx(np.log(4))
    finally:
        LOSSES.pop("adjusted", None)
        sys.modules.pop("counting", None)


def test_evaluations_of_unequal_classes_have_scikit_learns_metrics(folder, tmp_path, train):
    """After each epoch, by `widemix eval`, and for the checkpoint that is kept."""
    keys = SMALL | {"data.path": folder, "train.epochs": 6, "train.keep_best": "balanced_accuracy", "optim.lr": 0.5}
    code, said = train("run", *options_of(keys), "--train.keep_last", "1", recipe="base/own_images").wait()
    assert code == 0, said
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    measured = {line["step"]: line for line in lines if line["split"] == "eval"}
    kept = {int(path.name) for path in (tmp_path / "run/checkpoints").glob("[0-9]*")}
    best = max(measured.values(), key=lambda line: (line["balanced_accuracy"], line["step"]))["step"]
    assert kept == {best, 12}
    recipe, model = load_trained(tmp_path / "run")
    with EvalLoader(recipe.data, 128, ALONE).batches() as batches:
        (batch,) = batches
    guesses, labels = model.eval()(batch.inputs).argmax(1).detach(), batch.targets
    expected = [100 * balanced_accuracy_score(labels, guesses), 100 * f1_score(labels, guesses, average="macro")]
    found = widemix.evaluate(tmp_path / "run")
    for metrics in (measured[12], found):
        assert [metrics[name] for name in ("balanced_accuracy", "macro_f1")] == pytest.approx(expected)
    assert f"balanced accuracy {expected[0]:.2f} %  macro F1 {expected[1]:.2f} %" in said


def test_equal_classes_have_their_metrics_where_asked_for(tmp_path):
    prepare_unequal(tmp_path / "data", {"train": {"a": 20, "b": 20}, "val": {"a": 4, "b": 8}})
    for best, names in (("top1", {"top1"}), ("macro_f1", {"top1", "balanced_accuracy", "macro_f1"})):
        recipe = recipe_of(tmp_path / "data", **{"train.keep_best": best, "train.max_steps": 1})
        done = widemix.train(recipe, tmp_path / best)
        assert done is not None
        assert done.keys() - {"loss", "step", "seconds", "recipe", "best"} == names


def test_users_are_told_how_unequal_their_classes_are(tmp_path, folder, capsys):
    for label, count in (("ant", 23), ("bee", 2)):
        (tmp_path / f"images/train/{label}").mkdir(parents=True)
        for number in range(count):
            (tmp_path / f"images/train/{label}/{number}.png").write_bytes(png(number))
    words = "prep", "image-folder", "--from", tmp_path / "images", "--to", tmp_path / "data"
    code, said = Fork(*words, log=tmp_path / "log").wait()
    assert code == 0, said
    assert "2 to 23 of each of 2 classes, 2 of bee to 23 of ant (1 : 11.5)" in said
    hint = "its classes are unequal, 2 of dog to 40 of ant (1 : 20); --data.sampling balanced (or sqrt) samples small"
    for key in ("log.every", "data.sampling", "train.class_weights"):
        value = "1" if key == "log.every" else "sqrt"
        widemix.train(recipe_of(folder, **{key: value, "train.max_steps": 1}), tmp_path / key)
        assert (hint in capsys.readouterr().err) is (key == "log.every")
