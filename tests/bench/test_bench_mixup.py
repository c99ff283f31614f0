"""The benchmark of mixup times mixup, and takes its fractions from the times of the same round."""

import itertools
from argparse import Namespace

import numpy as np
import pytest
import timm
import torch

from tests.conftest import ROOT
from widemix.bench import mixup
from widemix.bench.timing import time_in_turns
from widemix.models.cost import model_cost
from widemix.recipe import load_recipe
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import IMAGENET_MEAN, IMAGENET_STD


def test_shares_are_medians_over_the_rounds_that_count():
    now = 0.0

    def takes(*seconds: float):
        """An action whose call takes so many seconds in each round."""

        def action(number: int) -> None:
            nonlocal now
            now += seconds[number % len(seconds)]

        return action

    contestants = {"step": mixup._repeat(takes(9.0, 1.0, 2.0, 4.0), 1), "mixup": mixup._repeat(takes(0.1), 20)}
    seconds = time_in_turns(contestants, 3, lambda: now)
    assert seconds["step"] == pytest.approx([1.0, 2.0, 4.0])  # the first round is not counted
    assert seconds["mixup"] == pytest.approx([0.1] * 3)
    step, row = (mixup._row(name, own, seconds["step"], size=8) for name, own in seconds.items())
    assert step == {"name": "step", "percent_of_step": 100, "images_per_s": 4, "ratio": 1}
    assert row == {"name": "mixup", "percent_of_step": 5, "images_per_s": 80, "ratio": 20}


@pytest.mark.parametrize("name", ["timm", *mixup.SETTINGS])
def test_every_contestant_mixes_each_call_anew(name):
    """Two images with each other: soft targets of both classes, and other fractions in the next call."""
    images, labels = torch.stack([torch.zeros(3, 8, 8), torch.ones(3, 8, 8)]), torch.tensor([1, 2])
    if name == "timm":
        act = mixup._timm(images, labels)
        found = [act(number)[1] for number in range(4)]
    else:
        act = mixup._mix_groups(images, labels, AugmentSection(mix_group=2, smoothing=0.1, **mixup.SETTINGS[name]))
        found = [act(number) for number in range(4)]
    for targets in found:
        assert targets.shape == (2, mixup.CLASSES)
        assert torch.allclose(targets.sum(1), torch.ones(2))
        assert torch.allclose(targets[:, 1] + targets[:, 2], torch.tensor(0.9), atol=1e-3)
    assert len({targets[0, 1].item() for targets in found}) == 4
    assert torch.equal(images[0], torch.zeros(3, 8, 8))  # each has images of its own


def test_the_step_trains_the_network_that_its_row_names(monkeypatch):
    """Mixer-B/16 itself is built by timm alone, without memory; a smaller network is trained in its place."""
    network, sections = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, mixup.CLASSES)), []
    monkeypatch.setattr(mixup, "build_model", lambda *arguments: sections.append(arguments) or network)
    images, labels = torch.randn(4, 3, 2, 2), torch.arange(4)
    step = mixup._step(images, labels)
    [(section, side, classes)] = sections
    with torch.device("meta"):
        theirs = timm.create_model("mixer_b16_224")
    assert (side, classes) == (224, theirs.num_classes)
    assert model_cost(section, side, classes).parameters == sum(p.numel() for p in theirs.parameters())
    before = torch.nn.functional.cross_entropy(network(images), labels)
    for number in range(3):
        step(number)
    assert torch.nn.functional.cross_entropy(network(images), labels) < before - 0.005


def test_each_row_times_the_mixtures_that_its_name_says(monkeypatch):
    """Of small images, by a clock that goes on by a second each time that it is read."""
    calls, reads, sample = [], itertools.count(), mixup.sample_mixture

    def kept(count, side, section, *numbers):
        calls.append((count, side, section))
        return sample(count, side, section, *numbers)

    monkeypatch.setattr(mixup, "SIDE", 8)
    monkeypatch.setattr(mixup, "REPEATS", 2)
    monkeypatch.setattr(mixup.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(mixup.torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(mixup, "_step", lambda *_: lambda number: None)
    monkeypatch.setattr(mixup, "sample_mixture", kept)
    monkeypatch.setattr(mixup, "compute_clock", lambda _: next(reads))
    step, *rows = mixup.run(Namespace(rounds=1))
    assert step == {"name": mixup.STEP, "images_per_s": 8, "ratio": 1, "percent_of_step": 100}
    finish = "normalised, erased, mixed and rounded one after the other"
    names = ["timm's Mixup, one mixture a batch", *mixup.SETTINGS, finish]
    assert rows == [{"name": name, "images_per_s": 16, "ratio": 2, "percent_of_step": 50} for name in names]
    options = [*mixup.SETTINGS.values(), {"mixup": 0.8, "cutmix": 1.0}]
    options = [own for own in options for _ in range(2)] * 2  # the first round is not counted
    for (count, side, section), own in zip(calls, options, strict=True):
        assert (count, side) == (8, 8)
        assert {key: getattr(section, key) for key in own} == own


def test_images_are_finished_as_the_training_loader_finishes_them(monkeypatch):
    """By the full recipe's erasing and mixtures, other ones in each call."""
    monkeypatch.setattr(mixup, "SIDE", 32)
    recipe, calls = load_recipe(ROOT / "recipes/imagenet/mixer_b16.yaml").augment, []
    finish = mixup._finish(torch.zeros(64, 3, 32, 32), 16, lambda *given: calls.append(given) or len(calls))
    assert [finish(number) for number in range(2)] == [1, 2]
    for number, (batch, mean, std, dtype, erasing, mixture) in enumerate(calls):
        assert (batch.shape, batch.dtype, dtype) == ((64, 32, 32, 3), torch.uint8, torch.float32)
        for found, expected in ((mean, IMAGENET_MEAN), (std, IMAGENET_STD)):
            torch.testing.assert_close(found, 255 * torch.tensor(expected).reshape(3, 1, 1))
        section = AugmentSection(re_prob=recipe.re_prob, mix_group=16, mixup=recipe.mixup, cutmix=recipe.cutmix)
        expected = mixup.sample_erasing(np.arange(64), 32, section, 0, number)
        assert repr(erasing) == repr(expected)
        assert repr(mixture) == repr(mixup.sample_mixture(64, 32, section, 0, number, 0))
    assert repr(calls[0][4:]) != repr(calls[1][4:])
