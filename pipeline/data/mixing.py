"""mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019) in fixed groups, and soft labels.

A group is a number of successive pictures of the global batch. Its random numbers are keyed by (seed, step, group):
it does not matter which ranks have which groups. Within a group this is timm's `Mixup` with the same random numbers,
in its modes: one draw for the whole batch (here: group), one for each pair, or one for each picture (elem).
"""

import numpy as np
import torch

from pipeline.data.random import MIX, key
from pipeline.recipe.augment import AugmentSection


def soft_labels(labels: torch.Tensor, classes: int, smoothing: float) -> torch.Tensor:
    """Labels int64 [B] to probabilities [B, classes], with label smoothing spread over all classes."""
    off = smoothing / classes
    targets = torch.full((len(labels), classes), off, device=labels.device)
    return targets.scatter_(1, labels[:, None], 1.0 - smoothing + off)


def mix_groups(
    images: torch.Tensor, targets: torch.Tensor, section: AugmentSection, seed: int, step: int, first_group: int
) -> torch.Tensor:
    """Mix each group of pictures [B, C, H, W] with itself in reverse order, in place; returns targets [B, classes].

    `first_group` is the number of this batch's first group within the global batch of `step`.
    """
    size = section.mix_group
    mixed = []
    for g, (group, labels) in enumerate(zip(images.split(size), targets.split(size), strict=True)):
        numbers = np.random.RandomState(key(seed, step, first_group + g, MIX) & 0xFFFFFFFF)
        mix = _mix_all if section.mix_mode == "batch" else _mix_each
        share = mix(group, section, numbers)
        mixed.append(labels * share + labels.flip(0) * (1.0 - share))
    return torch.cat(mixed)


def _mix_all(group: torch.Tensor, section: AugmentSection, numbers: np.random.RandomState) -> float:
    """Mix one group in place by one draw; returns the share of each picture in its own mixture."""
    if numbers.rand() >= section.mixup_prob:
        return 1.0
    both = section.mixup > 0 and section.cut_alpha > 0
    cut = numbers.rand() < section.mixup_switch_prob if both else section.cut_alpha > 0
    alpha = section.cut_alpha if cut else section.mixup
    share = float(numbers.beta(alpha, alpha))
    if share == 1.0:
        return share
    if cut:
        rows, columns, share = _box(group, share, section, numbers)
        group[:, :, rows, columns] = group.flip(0)[:, :, rows, columns]
    else:
        group.copy_(group * share + group.flip(0) * (1.0 - share))
    return share


def _mix_each(group: torch.Tensor, section: AugmentSection, numbers: np.random.RandomState) -> torch.Tensor:
    """Mix one group in place by a draw for each picture or each pair; returns shares [B, 1]."""
    pair, size = section.mix_mode == "pair", len(group)
    shares, cut = _draw_each(size // 2 if pair else size, section, numbers)
    original, blends = group.clone(), np.where(cut, np.float32(1), shares)
    for i in np.flatnonzero(cut & (shares != 1)):
        rows, columns, shares[i] = _box(group, shares[i], section, numbers)
        group[i, :, rows, columns] = original[size - 1 - i, :, rows, columns]
        if pair:
            group[size - 1 - i, :, rows, columns] = original[i, :, rows, columns]
    if pair:
        shares, blends = (np.concatenate([half, half[::-1]]) for half in (shares, blends))
    blend = torch.from_numpy(blends).to(group.device)[:, None, None, None]
    group.mul_(blend).add_(original.flip(0) * (1.0 - blend))
    return torch.from_numpy(shares).to(group.device)[:, None]


def _draw_each(count: int, section: AugmentSection, numbers: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """float32 shares [count], and which of the draws are CutMix: bool [count]."""
    cut = np.full(count, section.cut_alpha > 0)
    if section.mixup > 0 and section.cut_alpha > 0:
        cut = numbers.rand(count) < section.mixup_switch_prob
        cuts = numbers.beta(section.cut_alpha, section.cut_alpha, count)
        shares = np.where(cut, cuts, numbers.beta(section.mixup, section.mixup, count))
    else:
        alpha = section.cut_alpha or section.mixup
        shares = numbers.beta(alpha, alpha, count)
    mixed = numbers.rand(count) < section.mixup_prob
    return np.where(mixed, shares, 1.0).astype(np.float32), cut


def _box(
    group: torch.Tensor, share: float, section: AugmentSection, numbers: np.random.RandomState
) -> tuple[slice, slice, float]:
    """Rows and columns of the box to replace, and the share of the picture outside of it."""
    height, width = group.shape[-2:]
    if section.cutmix_minmax is not None:
        least, greatest = section.cutmix_minmax
        cut_h = numbers.randint(int(height * least), int(height * greatest))
        cut_w = numbers.randint(int(width * least), int(width * greatest))
        top, left = numbers.randint(0, height - cut_h + 1), numbers.randint(0, width - cut_w + 1)
        bottom, right = top + cut_h, left + cut_w
    else:
        ratio = np.sqrt(1 - share)
        cut_h, cut_w = int(height * ratio), int(width * ratio)
        y, x = numbers.randint(0, height), numbers.randint(0, width)
        top, bottom = np.clip([y - cut_h // 2, y + (cut_h + 1) // 2], 0, height)
        left, right = np.clip([x - cut_w // 2, x + (cut_w + 1) // 2], 0, width)
    left_over = 1.0 - float((bottom - top) * (right - left)) / (height * width)
    return slice(int(top), int(bottom)), slice(int(left), int(right)), left_over
