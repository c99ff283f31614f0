"""The benchmark of mixup times mixup, and takes its fractions from the times of the same round."""

import itertools

import numpy as np
import pytest
import timm
import torch

from tests.bench.conftest import Clock
from tests.conftest import ROOT
from widemix.bench.mixup import CLASSES, MIXER_B16, SETTINGS, STEP, last_steps, mixups, repeat, rows_of, train_step
from widemix.data.augment.erase import sample_erasing
from widemix.data.mixup import sample_mixture
from widemix.models.cost import model_cost
from widemix.recipe import load_recipe
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import IMAGENET_MEAN, IMAGENET_STD

CPU = torch.device("cpu")


def test_fractions_are_medians_over_the_rounds_that_count(clock: Clock):
    def takes(*seconds: float):
        """An action whose call takes so many seconds in each round."""
        return lambda number: clock.takes(seconds[number % len(seconds)])

    contestants = {STEP: repeat(takes(9.0, 1.0, 2.0, 4.0), 1), "mixup": repeat(takes(0.1), 20)}
    step, row = rows_of(contestants, 3, CPU, size=8)
    assert step == {"name": STEP, "percent_of_step": 100, "images_per_s": 4, "ratio": 1}
    assert row == {"name": "mixup", "percent_of_step": 5, "images_per_s": 80, "ratio": 20}


FINISHED = "normalised, erased, mixed and rounded one after the other"


@pytest.mark.parametrize(
    ("name", "mixtures"), list(zip(["timm's Mixup, one mixture a batch", *SETTINGS], (1, 1, 4, 8, 1), strict=True))
)
def test_every_contestant_mixes_each_call_anew(name, mixtures):
    """Eight images in pairs: soft targets of both classes, of so many fractions, other ones in the next call."""
    images, labels = torch.arange(8.0)[:, None, None, None].expand(8, 3, 64, 64).clone(), torch.arange(8)
    contestants = mixups(images, labels, 8)
    assert list(contestants) == ["timm's Mixup, one mixture a batch", *SETTINGS, FINISHED]
    found = [contestants[name](number) for number in range(4)]
    fractions = []
    for targets in (each[1] if isinstance(each, tuple) else each for each in found):
        assert targets.shape == (8, CLASSES)
        assert torch.allclose(targets.sum(1), torch.ones(8))
        both = targets[:, :8] + targets[:, :8].flip(1)
        assert torch.allclose(both.diagonal(), torch.full((8,), 0.9), atol=1e-3)
        fractions.append({round(value, 4) for value in targets[:, :8].diagonal().tolist()})
    assert max(map(len, fractions)) == mixtures
    assert len(set(map(frozenset, fractions))) == 4
    assert torch.equal(images[0], torch.zeros(3, 64, 64))  # each has images of its own


def test_the_step_trains_the_network_that_its_row_names():
    """Mixer-B/16 itself is built by timm alone, without memory; a smaller network is trained in its place."""
    with torch.device("meta"):
        theirs = timm.create_model("mixer_b16_224")
    assert model_cost(MIXER_B16, 224, theirs.num_classes).parameters == sum(p.numel() for p in theirs.parameters())
    small = MIXER_B16.model_copy(
        update={"channels": 8, "depth": 1, "token_hidden": 8, "channel_hidden": 8, "patch_size": 4}
    )
    step = train_step(torch.randn(4, 3, 8, 8), torch.arange(4), small)
    losses = [step(number).item() for number in range(20)]
    assert losses[-1] < losses[0] - 0.05
    assert all(after < before for before, after in itertools.pairwise(losses[::5]))


def test_images_are_finished_as_the_training_loader_finishes_them():
    """By the full recipe's erasing and mixtures, other ones in each call."""
    recipe, calls = load_recipe(ROOT / "recipes/imagenet/mixer_b16.yaml").augment, []
    finish = last_steps(torch.zeros(64, 3, 32, 32), 16, lambda *given: calls.append(given) or len(calls))
    assert [finish(number) for number in range(2)] == [1, 2]
    for number, (batch, mean, std, dtype, erasing, mixture) in enumerate(calls):
        assert (batch.shape, batch.dtype, dtype) == ((64, 32, 32, 3), torch.uint8, torch.float32)
        for found, expected in ((mean, IMAGENET_MEAN), (std, IMAGENET_STD)):
            torch.testing.assert_close(found, 255 * torch.tensor(expected).reshape(3, 1, 1))
        section = AugmentSection(re_prob=recipe.re_prob, mix_group=16, mixup=recipe.mixup, cutmix=recipe.cutmix)
        assert repr(erasing) == repr(sample_erasing(np.arange(64), 32, section, 0, number))
        assert repr(mixture) == repr(sample_mixture(64, 32, section, 0, number, 0))
    assert repr(calls[0][4:]) != repr(calls[1][4:])
