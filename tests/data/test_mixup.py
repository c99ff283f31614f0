"""mixup and CutMix: timm's for the same random numbers, of each group."""

import pytest
import torch

from tests.data.plain_batches import mixed
from widemix.data.mixup import sample_mixture, soft_labels
from widemix.recipe.augment import AugmentSection


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
    keys = {"mixup": mixup, "cutmix": cutmix, "cutmix_minmax": minmax, "mixup_prob": prob, "mix_mode": mode}
    section = AugmentSection(mix_group=8, smoothing=0.1, mixup_switch_prob=0.3, **keys)
    numbers = torch.Generator().manual_seed(0)
    for step in range(20):
        images, labels = torch.randn(16, 3, 12, 12, generator=numbers), torch.randint(10, (16,), generator=numbers)
        ours, mixture = images.clone(), sample_mixture(16, 12, section, seed=3, step=step, first_group=0)
        mixture.mix(ours)
        targets = mixture.mix_targets(soft_labels(labels, 10, 0.1))
        expected_images, expected_targets = mixed(images, labels, section, 10, (3, step))
        torch.testing.assert_close(ours, expected_images)
        torch.testing.assert_close(targets, expected_targets)
