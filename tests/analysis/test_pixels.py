"""Accuracy on shuffled pixels: a run trained on them, against its own evaluations and a plain forward pass."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from widemix.analysis.pixels import shuffled_inputs
from widemix.cli.parser import make_parser
from widemix.command_line.commands import run_command
from widemix.data.loader import EvalLoader
from widemix.data.pixel_order import pixel_permutation
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.evaluation.assessment import evaluate_checkpoint
from widemix.evaluation.networks import load_network


def test_the_command_on_a_run_that_was_stopped_and_resumed(digits, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    words = ["train", "recipes/digits/s_mixer.yaml", "--run-dir", str(run), "--data.path", str(digits)]
    words += ["--data.pixel_order", "patches", "--data.pixel_patch", "2", "--data.pixel_seed", "5"]
    words += ["--model.depth", "1", "--log.tensorboard", "false", "--data.workers", "1", "--train.max_steps"]
    for steps in ("2", "30"):
        assert run_command(make_parser(), argv=[*words, steps]) == 0
    other = [word if word != "5" else "6" for word in words]
    assert run_command(make_parser(), argv=[*other, "31"]) == 2  # not the same run
    assert "data.pixel_seed" in capsys.readouterr().err

    options = ["--to", str(out), "--json", str(tmp_path / "pixels.json")]
    assert run_command(make_parser(), argv=["analyse", "pixels", str(run), *options]) == 0
    [found] = json.loads((tmp_path / "pixels.json").read_text())
    assert {path.name for path in out.glob("*.png")} == {"pixels.png", "inputs.png"}
    done = json.loads((run / "done.json").read_text())
    assert (found["trained"], found["patch"], found["samples"]) == ("patches", 2, 360)
    assert (found["top1"]["patches"], found["loss"]["patches"]) == (done["top1"], pytest.approx(done["loss"]))
    assert evaluate_checkpoint(run, None, None, None)["top1"] == done["top1"]

    network = load_network(str(run))
    plain = shuffled_inputs(network, "original").data
    everything = EvalLoader(plain, 360, Topology(0, 1, 0, 1, torch.device("cpu")))
    with everything.batches() as batches:
        batch = next(batches)
    for order in ("original", "patches", "all"):
        place = pixel_permutation(shuffled_inputs(network, order).data, torch.device("cpu"))
        x = batch.inputs if place is None else batch.inputs.flatten(2)[:, :, place].view(360, 3, 8, 8)
        logits = network.module(x).detach()
        assert found["top1"][order] == pytest.approx(100 * (logits.argmax(1) == batch.targets).float().mean().item())
        assert found["loss"][order] == pytest.approx(cross_entropy(logits, batch.targets).item(), rel=1e-5)
    assert len(set(found["loss"].values())) == 3

    capsys.readouterr()
    assert run_command(make_parser(), argv=["export", str(run), "--to", str(tmp_path / "export")]) == 2
    assert "data.pixel_order patches" in capsys.readouterr().err
    with pytest.raises(InputError, match="patches of 3 pixels do not divide its 8 pixels"):
        shuffled_inputs(network, "patches", 3)
