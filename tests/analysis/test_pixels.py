"""Accuracy on shuffled pixels: a run trained on them, against its own evaluations and a plain forward pass."""

import argparse
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from widemix.analysis.pixels import (
    ORDERS,
    ROW,
    PixelScores,
    patch_side,
    pixel_scores,
    plot_inputs,
    shuffled_inputs,
)
from widemix.data.grid import denormalise
from widemix.data.loader import EvalLoader
from widemix.data.normalise_and_mix import pixel_permutation
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.evaluation.assessment import assess, assess_network
from widemix.evaluation.networks import load_network
from widemix.recipe import load_recipe


def test_the_command_on_a_run_that_was_stopped_and_resumed(digits, tmp_path, widemix):
    run, out = tmp_path / "run", tmp_path / "out"
    words = ["train", "recipes/digits/s_mixer.yaml", "--run-dir", str(run), "--data.path", str(digits)]
    words += ["--data.pixel_order", "patches", "--data.pixel_patch", "2", "--data.pixel_seed", "5"]
    words += ["--model.depth", "1", "--log.tensorboard", "false", "--data.workers", "1", "--train.max_steps"]
    for steps in ("2", "30"):
        assert widemix(*words, steps)[0] == 0
    other = [word if word != "5" else "6" for word in words]
    code, said = widemix(*other, "31")
    assert (code, "data.pixel_seed" in said) == (2, True)  # not the same run
    assert widemix("analyse", "pixels", run, "--to", out, "--json", tmp_path / "pixels.json")[0] == 0
    [found] = json.loads((tmp_path / "pixels.json").read_text())
    assert {path.name for path in out.glob("*.png")} == {"pixels.png", "inputs.png"}
    done = json.loads((run / "done.json").read_text())
    assert (found["trained"], found["patch"], found["samples"]) == ("patches", 2, 360)
    assert (found["top1"]["patches"], found["loss"]["patches"]) == (done["top1"], pytest.approx(done["loss"]))
    assert assess(str(run)).metrics["top1"] == done["top1"]

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

    code, said = widemix("export", run, "--to", tmp_path / "export")
    assert (code, "data.pixel_order patches" in said) == (2, True)


def test_patches_have_the_side_of_training_or_the_networks():
    network = load_network("recipes/digits/s_mixer.yaml")  # of patches of 2 pixels
    trained = network.data.model_copy(update={"pixel_order": "patches", "pixel_patch": 4})
    stem = argparse.Namespace(patch_size=(4, 4))
    timms = argparse.Namespace(patch_embed=stem)
    for changes, side in (
        ({}, 2),
        ({"data": trained}, 4),
        ({"data": trained.model_copy(update={"pixel_order": "all"})}, 2),
        ({"module": timms}, 4),
        ({"module": argparse.Namespace()}, 16),
    ):
        assert patch_side(replace(network, **changes)) == side
    assert shuffled_inputs(replace(network, data=trained), "all").data.pixel_patch == 4
    given = shuffled_inputs(replace(network, data=trained), "patches", 1).data
    assert (given.pixel_order, given.pixel_patch) == ("patches", 1)
    with pytest.raises(InputError, match="reads text, which has no pixels"):
        shuffled_inputs(replace(network, data=load_recipe("mnli/mixer").data), "all")
    numbers = replace(network, data=network.data.model_copy(update={"targets": "regression"}))
    with pytest.raises(InputError, match=r"predicts no classes \(data\.targets is regression\)"):
        pixel_scores(numbers)


def test_the_side_asked_for_is_that_of_all_orders(digits):
    network = load_network("recipes/digits/s_mixer.yaml")
    torch.nn.init.normal_(network.module.head.weight)
    found = pixel_scores(network, digits, "train", 500, 4)
    alone = {
        order: assess_network(shuffled_inputs(network, order, 4), digits, "train", 500).metrics for order in ORDERS
    }
    tops, losses = ({order: each[name] for order, each in alone.items()} for name in ("top1", "loss"))
    assert found == PixelScores(network.name, "original", 4, 1437, tops, losses)
    assert len(set(losses.values())) == 3
    stem = argparse.Namespace(patch_size=(4, 8))  # rows and columns
    assert patch_side(replace(network, module=argparse.Namespace(stem=stem))) == 4


def test_the_sheet_has_the_first_images_in_each_order(digits):
    network = load_network("recipes/digits/s_mixer.yaml")
    figure = plot_inputs(network, digits, "train", 4)
    shown = np.array([axes.images[0].get_array() for axes in figure.axes]).reshape(3, ROW, 8, 8, 3)
    section = network.data.model_copy(update={"path": str(digits), "eval_split": "train", "pixel_patch": 4})
    with EvalLoader(section, ROW, Topology(0, 1, 0, 1, torch.device("cpu"))).batches() as batches:
        plain = denormalise(next(batches).inputs, section)
    for order, images in zip(ORDERS, shown, strict=True):
        own = section.model_copy(update={"pixel_order": order})
        place = pixel_permutation(own, torch.device("cpu"))
        expected = plain if place is None else plain.reshape(ROW, 64, 3)[:, place].reshape(plain.shape)
        assert np.array_equal(images, expected)
