"""mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019) in fixed groups, and soft labels.

A group is a run of pictures of the global batch; its draw is keyed by (seed, step, group), so that which ranks hold
the groups does not matter. Within a group this is timm's `Mixup` in batch mode, draw for draw.
"""

import numpy as np
import torch

from pipeline.data.random import MIX, key
from pipeline.recipe.schema import AugmentSection


def soft_labels(labels: torch.Tensor, classes: int, smoothing: float) -> torch.Tensor:
    """int64 [B] to probabilities [B, classes]: 1 - smoothing on the label, smoothing spread over all classes."""
    off = smoothing / classes
    targets = torch.full((len(labels), classes), off, device=labels.device)
    return targets.scatter_(1, labels[:, None], 1.0 - smoothing + off)


def mix_groups(
    images: torch.Tensor, targets: torch.Tensor, section: AugmentSection, seed: int, step: int, first_group: int
) -> torch.Tensor:
    """Mix each group of pictures [B, C, H, W] in place with itself in reverse; the mixed targets [B, classes].

    `first_group` is the number of this batch's first group within the global batch of `step`.
    """
    size = section.mix_group
    mixed = []
    for g, (group, labels) in enumerate(zip(images.split(size), targets.split(size), strict=True)):
        numbers = np.random.RandomState(key(seed, step, first_group + g, MIX) & 0xFFFFFFFF)
        share = _mix(group, section, numbers)
        mixed.append(labels * share + labels.flip(0) * (1.0 - share))
    return torch.cat(mixed)


def _mix(group: torch.Tensor, section: AugmentSection, numbers: np.random.RandomState) -> float:
    """Mix one group in place; the share of each picture that remains its own."""
    if numbers.rand() >= section.mixup_prob:
        return 1.0
    both = section.mixup > 0 and section.cutmix > 0
    cut = numbers.rand() < section.mixup_switch_prob if both else section.cutmix > 0
    alpha = section.cutmix if cut else section.mixup
    share = float(numbers.beta(alpha, alpha))
    if share == 1.0:
        return share
    if cut:
        return _cutmix(group, share, numbers)
    group.copy_(group * share + group.flip(0) * (1.0 - share))
    return share


def _cutmix(group: torch.Tensor, share: float, numbers: np.random.RandomState) -> float:
    height, width = group.shape[-2:]
    cut_h, cut_w = int(height * np.sqrt(1 - share)), int(width * np.sqrt(1 - share))
    y, x = numbers.randint(0, height), numbers.randint(0, width)
    top, bottom = np.clip([y - cut_h // 2, y + (cut_h + 1) // 2], 0, height)
    left, right = np.clip([x - cut_w // 2, x + (cut_w + 1) // 2], 0, width)
    group[:, :, top:bottom, left:right] = group.flip(0)[:, :, top:bottom, left:right]
    return 1.0 - float((bottom - top) * (right - left)) / (height * width)
