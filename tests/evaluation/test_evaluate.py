"""Evaluation against the metrics of one batch, and with metrics that are not numbers."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from tests.conftest import Fork
from widemix.data.batches import Batch
from widemix.evaluation.evaluate import evaluate


class Batches(list):
    def batches(self):
        return nullcontext(self)

    data = SimpleNamespace(targets="class")
    topology = SimpleNamespace(device=torch.device("cpu"), world=1, is_main=True)


def loader(inputs: torch.Tensor, labels: torch.Tensor) -> Batches:
    """Batches of seven, and an empty one, as the last rank may have."""
    pairs = [*zip(inputs.split(7), labels.split(7), strict=True), (inputs[:0], labels[:0])]
    return Batches(Batch(x, y, np.arange(len(x))) for x, y in pairs)


def test_figures_are_those_of_one_batch_and_a_nan_among_them_is_seen():
    torch.manual_seed(0)
    inputs, labels = torch.randn(45, 12), torch.randint(10, (45,))
    model = torch.nn.Linear(12, 10)
    found = evaluate(model, nullcontext(), loader(inputs, labels), 10)
    logits = model(inputs)
    assert found["loss"] == pytest.approx(cross_entropy(logits, labels).item())
    assert found["top1"] == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
    among_five = (logits.topk(5).indices == labels[:, None]).any(1)
    assert found["top5"] == pytest.approx(100 * among_five.float().mean().item())
    assert model.training  # as it was before
    inputs[11] = torch.nan
    found = evaluate(model, nullcontext(), loader(inputs, labels), 10)
    assert all(map(np.isnan, found.values())), found


class Heads(torch.nn.Module):
    """As attention of timm's Swin and BEiT, which a batch of none leaves no way to tell the last size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(x), 4, -1).flatten(1)


def test_a_network_that_takes_no_empty_batch_is_evaluated_and_called_once_for_each():
    """FSDP and ZeRO 3 gather weights in each call, which all ranks make together."""
    torch.manual_seed(0)
    inputs, labels, sizes = torch.randn(14, 12), torch.randint(3, (14,)), []
    model = Heads()
    model.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    found = evaluate(model, nullcontext(), loader(inputs, labels), 12)
    assert found["loss"] == pytest.approx(cross_entropy(inputs, labels).item())
    assert sizes == [7, 7, 1]


def test_accuracy_is_known_where_a_class_is_ruled_out_and_the_loss_is_infinite():
    inputs, labels = torch.eye(12)[:4], torch.tensor([0, 1, 2, 9])
    model = torch.nn.Linear(12, 10, bias=False)
    torch.nn.init.eye_(model.weight)
    model.register_forward_hook(lambda module, args, logits: logits.index_fill(1, torch.tensor([9]), -torch.inf))
    found = evaluate(model, nullcontext(), loader(inputs, labels), 10)
    assert found["loss"] == np.inf
    assert found["top1"] == 75


def test_scores_that_are_nan_have_no_average_precision():
    batches = loader(torch.eye(12), torch.eye(12))
    batches.data = SimpleNamespace(targets="multilabel")
    model = torch.nn.Identity()
    assert evaluate(model, nullcontext(), batches, 12)["map"] == pytest.approx(100)
    batches[0].inputs[3, 3] = torch.nan
    assert np.isnan(evaluate(model, nullcontext(), batches, 12)["map"])


def test_a_run_whose_evaluation_is_nan_says_so_and_is_complete(train, tmp_path):
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
