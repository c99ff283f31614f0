"""Evaluation against the metrics of one batch, and with metrics that are not numbers."""

import json
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchmetrics
from safetensors.torch import load_file, save_file
from sklearn.metrics import average_precision_score, mean_absolute_error, r2_score
from torch.nn.functional import cross_entropy

from tests.conftest import Fork
from widemix.data.batches import Batch
from widemix.errors import InputError
from widemix.evaluation.evaluate import evaluate, evaluate_engine
from widemix.formats.manifest import manifest_json, read_manifest
from widemix.metrics import MEASURED, METRICS, Metric


class Batches(list):
    def __len__(self):
        return sum(map(len, self))

    def batches(self):
        return nullcontext(self)

    data, is_unequal = SimpleNamespace(targets="class"), False
    topology = SimpleNamespace(device=torch.device("cpu"), world=1, is_main=True)


def loader(inputs: torch.Tensor, labels: torch.Tensor) -> Batches:
    """Batches of seven, and an empty one, as the last rank may have."""
    pairs = [*zip(inputs.split(7), labels.split(7), strict=True), (inputs[:0], labels[:0])]
    return Batches(Batch(x, y, np.arange(len(x))) for x, y in pairs)


def test_metrics_are_those_of_one_batch():
    torch.manual_seed(0)
    inputs, labels = torch.randn(45, 12), torch.randint(10, (45,))
    model, beats, seen = torch.nn.Linear(12, 10), [], []
    batches = loader(inputs, labels)
    found = evaluate(
        model, nullcontext(), batches, 10, lambda: beats.append(1), lambda logits, batch: seen.append((logits, batch))
    )
    logits = model(inputs)
    assert len(beats) == 8  # the watchdog waits for those of empty batches too
    assert torch.equal(torch.cat([logits for logits, _ in seen]), logits)
    assert [batch for _, batch in seen] == batches[:7]
    assert found["loss"] == pytest.approx(cross_entropy(logits, labels).item())
    assert found["top1"] == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
    among_five = (logits.topk(5).indices == labels[:, None]).any(1)
    assert found["top5"] == pytest.approx(100 * among_five.float().mean().item())
    assert model.training  # as it was before
    evaluate(model.eval(), nullcontext(), batches, 10)
    assert not model.training
    inputs[11] = torch.nan
    found = evaluate(model, nullcontext(), loader(inputs, labels), 10)
    assert all(map(np.isnan, found.values())), found


class Heads(torch.nn.Module):
    """As attention of timm's Swin and BEiT, which a batch of none leaves no way to tell the last size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(x), 4, -1).flatten(1)


def test_a_network_that_takes_no_empty_batch_is_evaluated():
    """FSDP and ZeRO 3 gather weights in each call, which all ranks make together."""
    torch.manual_seed(0)
    inputs, labels, sizes = torch.randn(14, 12), torch.randint(3, (14,)), []
    model = Heads()
    model.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    found = evaluate(model, nullcontext(), loader(inputs, labels), 12)
    assert found["loss"] == pytest.approx(cross_entropy(inputs, labels).item())
    assert sizes == [7, 7, 1]


def test_accuracy_is_known_where_the_loss_is_infinite():
    inputs, labels = torch.eye(12)[:4], torch.tensor([0, 1, 2, 9])
    model = torch.nn.Linear(12, 10, bias=False)
    torch.nn.init.eye_(model.weight)
    model.register_forward_hook(lambda module, args, logits: logits.index_fill(1, torch.tensor([9]), -torch.inf))
    found = evaluate(model, nullcontext(), loader(inputs, labels), 10)
    assert found["loss"] == np.inf
    assert found["top1"] == 75


def test_scores_that_float32_rounds_to_1_keep_their_order():
    logits = torch.tensor([[18.0], [25.0], [30.0], [22.0], [20.0]])
    assert (logits.sigmoid() == 1).sum() == 5
    targets = torch.tensor([[0.0], [1.0], [1.0], [0.0], [1.0]])
    batches = loader(logits, targets)
    batches.data = SimpleNamespace(targets="multilabel")
    expected = 100 * average_precision_score(targets[:, 0], logits[:, 0])
    assert evaluate(torch.nn.Identity(), nullcontext(), batches, 1)["map"] == pytest.approx(expected)


def test_scores_that_are_nan_have_no_average_precision():
    batches = loader(torch.eye(12), torch.eye(12))
    batches.data = SimpleNamespace(targets="multilabel")
    model = torch.nn.Identity()
    assert evaluate(model, nullcontext(), batches, 12)["map"] == pytest.approx(100)
    batches[0].inputs[3, 3] = torch.nan
    assert np.isnan(evaluate(model, nullcontext(), batches, 12)["map"])


def regression(outputs: torch.Tensor, targets: torch.Tensor) -> Batches:
    batches = loader(outputs, targets)
    batches.data = SimpleNamespace(targets="regression", path="nowhere", eval_split="val")
    return batches


def test_numbers_far_from_zero_have_their_metrics():
    """Years, or temperatures in kelvin: in float32 their mean would be off by more than they differ."""
    torch.manual_seed(0)
    targets = 1e6 + torch.rand(9, 2)
    outputs = targets + torch.rand(9, 2) / 4
    found = evaluate(torch.nn.Identity(), nullcontext(), regression(outputs, targets), 2)
    truth, guess = targets.double().numpy(), outputs.double().numpy()
    assert found["r2"] == pytest.approx(r2_score(truth, guess), rel=1e-9)
    assert found["mae"] == pytest.approx(mean_absolute_error(truth, guess), rel=1e-9)
    assert found["loss"] == pytest.approx(((truth - guess) ** 2).mean(), rel=1e-5)
    two = evaluate(torch.nn.Identity(), nullcontext(), regression(outputs[:2], targets[:2]), 2)
    assert two["r2"] == pytest.approx(r2_score(truth[:2], guess[:2]), rel=1e-9)
    with pytest.raises(InputError, match=r"data\.eval_split has one sample, and R2 needs two"):
        evaluate(torch.nn.Identity(), nullcontext(), regression(outputs[:1], targets[:1]), 2)


def test_outputs_of_half_precision_are_measured_as_fp32():
    outputs, labels = torch.randn(14, 3, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.arange(14) % 3
    seen: list[torch.Tensor] = []
    found = evaluate(
        torch.nn.Identity(), nullcontext(), loader(outputs, labels), 3, observe=lambda logits, _: seen.append(logits)
    )
    assert {logits.dtype for logits in seen} == {torch.float32}
    assert found["loss"] == pytest.approx(cross_entropy(outputs.float(), labels).item(), rel=1e-6)
    assert "top5" not in found  # of three classes


def test_the_main_rank_alone_names_ten_columns_without_a_value(digits, tmp_path, monkeypatch, capsys):
    """The prepared folder has names for the first five only."""
    manifest = read_manifest(digits).model_copy(update={"classes": tuple("abcde")})
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere/manifest.json").write_text(manifest_json(manifest))
    monkeypatch.chdir(tmp_path)
    targets = torch.zeros(9, 14)
    targets[:, 2] = torch.arange(9.0)
    for is_main in (False, True):
        batches = regression(targets + 1, targets)
        batches.topology = SimpleNamespace(device=torch.device("cpu"), is_main=is_main)
        found = evaluate(torch.nn.Identity(), nullcontext(), batches, 14)
        assert found["r2"] == pytest.approx(1 - 9 / 60)
        said = capsys.readouterr().err
        assert bool(said) == is_main
    assert said.endswith("over the 1 of 14 targets that vary, without a, b, d, e, 5, 6, 7, 8, 9, 10 and 3 more\n")
    evaluate(torch.nn.Identity(), nullcontext(), batches, 14)
    assert capsys.readouterr().err == ""  # once, and not after each epoch
    eleven = regression(targets[:, 2:13] + 1, targets[:, 2:13])
    evaluate(torch.nn.Identity(), nullcontext(), eleven, 11)
    assert capsys.readouterr().err.endswith("1 of 11 targets that vary, without b, c, d, e, 5, 6, 7, 8, 9, 10\n")
    found = evaluate(torch.nn.Identity(), nullcontext(), regression(targets[:, :2], targets[:, :2]), 2)
    assert found == {"loss": 0, "mae": 0}  # where none varies there is no r2
    assert capsys.readouterr().err.endswith("no target varies: it has no R2\n")


def test_a_registered_metric_is_that_of_its_kind_of_targets(monkeypatch):
    def hamming(outputs):
        return torchmetrics.classification.MulticlassHammingDistance(outputs, average="micro")

    for name, kind in (("hamming", "class"), ("other", "regression")):
        monkeypatch.setitem(METRICS, name, Metric(name, "{:.2f}", False, hamming))
        monkeypatch.setitem(MEASURED, kind, (*MEASURED[kind], name))
    labels = torch.tensor([0, 1, 2, 0])
    found = evaluate(torch.nn.Identity(), nullcontext(), loader(torch.eye(6)[:4], labels), 6)
    assert sorted(found) == ["hamming", "loss", "top1", "top5"]
    assert found["hamming"] == pytest.approx(1 / 4)  # a fraction, where its form is not that of percent


def test_each_set_of_an_engines_weights_is_evaluated():
    """The trained ones alone are observed; those of a penalty that makes zeros are counted."""
    inputs, labels = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3
    module, batches, seen, beats = torch.nn.Linear(4, 3), loader(inputs, labels), [], []
    batches.is_unequal = True

    @contextmanager
    def average():
        module.weight.data.neg_()
        yield
        module.weight.data.neg_()

    engine = SimpleNamespace(weights=lambda: {"": nullcontext(), "ema_": average()}, zero_weights=lambda: 12.5)
    engine.module, engine.spec = module, SimpleNamespace(penalty="weight_decay")
    engine.evaluate_mode = lambda: torch.autocast("cpu", torch.bfloat16)
    both = {"": evaluate(module, engine.evaluate_mode(), batches, 3, by_class=True)}
    with average():
        both["ema_"] = evaluate(module, engine.evaluate_mode(), batches, 3, by_class=True)
    expected = {f"{prefix}{name}": value for prefix, found in both.items() for name, value in found.items()}
    assert expected["macro_f1"] != expected["ema_macro_f1"]
    found = evaluate_engine(engine, batches, 3, lambda: beats.append(1), lambda logits, _: seen.append(logits), True)  # type: ignore[arg-type]
    assert found == expected
    with torch.no_grad(), engine.evaluate_mode():
        assert torch.equal(torch.cat(seen), module(inputs).float())
    assert len(beats) == 2 * len(batches[:])
    engine.spec.penalty = "l1"
    assert evaluate_engine(engine, batches, 3, by_class=True) == expected | {"zero_weights": 12.5}  # type: ignore[arg-type]


def test_a_run_whose_evaluation_is_nan_is_complete(train, tmp_path):
    """Of running means so large that images less them overflow; training does not use them."""
    options = {"recipe": "tests/engine/repmlp.yaml"}
    steps = ("--train.max_steps", "2")
    assert train("whole", *steps, **options).wait()[0] == 0
    weights = load_file(tmp_path / "whole/checkpoints/00000002/model.safetensors")
    for name, values in weights.items():
        if name.endswith("running_mean"):
            values.fill_(3e38)
    save_file(weights, tmp_path / "large.safetensors")
    start = ("--train.init_from", str(tmp_path / "large.safetensors"))
    code, output = train("run", *steps, *start, **options).wait()
    assert code == 0, output
    assert "the evaluation at step 2 failed: loss nan" in output
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["event"] == "evaluation_failed"
    done = json.loads((tmp_path / "run/done.json").read_text())
    assert [done[name] for name in ("loss", "top1", "top5")] == [None] * 3
    code, output = train("run", *steps, *start, **options).wait()
    assert code == 0, output
    code, output = Fork("eval", tmp_path / "run", log=tmp_path / "eval.log").wait()
    assert code == 0, output
    assert "nan" in output.lower()
