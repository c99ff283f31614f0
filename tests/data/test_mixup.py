"""mixup and CutMix: timm's for the same random numbers, independent of the world size."""

import numpy as np
import pytest
import torch
from timm.data import Mixup

from widemix.data.mixup import sample_mixture, soft_labels
from widemix.data.random import MIX, key
from widemix.recipe.augment import AugmentSection

GROUP, CLASSES = 8, 10


def batch(size):
    numbers = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, 12, 12, generator=numbers), torch.randint(CLASSES, (size,), generator=numbers)


def section_of(**keys) -> AugmentSection:
    return AugmentSection(mix_group=GROUP, smoothing=0.1, mixup_switch_prob=0.3, **keys)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize(
    ("mixup", "cutmix", "minmax"),
    [
        (0.8, 1.0, None),
        (0.8, 0.0, None),
        (0.0, 1.0, None),
        (0.8, 0.3, (0.2, 0.8)),
        (0.0, 0.0, (0.3, 0.5)),
        (0.8, 0.0, (0.2, 0.6)),
    ],
)
@pytest.mark.parametrize("prob", [0.5, 1.0])
def test_each_group_is_timms_mixup_with_the_same_numbers(mixup, cutmix, minmax, prob, mode):
    section = section_of(mixup=mixup, cutmix=cutmix, cutmix_minmax=minmax, mixup_prob=prob, mix_mode=mode)
    options = {"switch_prob": 0.3, "label_smoothing": 0.1, "num_classes": CLASSES}
    timms = Mixup(mixup, cutmix, minmax, prob=prob, mode=mode, **options)
    for step in range(40):
        images, labels = batch(GROUP)
        ours = images.clone()
        mixture = sample_mixture(GROUP, 12, section, seed=3, step=step, first_group=5)
        mixture.mix(ours)
        targets = mixture.mix_targets(soft_labels(labels, CLASSES, 0.1))
        np.random.seed(key(3, step, 5, MIX) & 0xFFFFFFFF)
        expected_images, expected_targets = timms(images, labels)
        torch.testing.assert_close(ours, expected_images)
        torch.testing.assert_close(targets, expected_targets)
