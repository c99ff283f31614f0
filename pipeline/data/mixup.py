"""mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019) in fixed groups, and soft labels.

A group is a number of successive images of the global batch. Its random numbers are keyed by (seed, step, group):
it does not matter which ranks have which groups. Within a group this is timm's `Mixup` with the same random numbers,
in its modes: one mixture for the whole batch (here: group), one for each pair, or one for each image (elem).
"""

from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import torch

from widemix.data.compiled import jit, jit_noalias, run_on_threads
from widemix.data.random import MIX, key
from widemix.recipe.augment import AugmentSection


@dataclass(frozen=True)
class Mixture:
    """How the images of a batch are mixed, each with its partner, the image at its place in the reversed group.

    An image becomes weight x image + weight x partner, and then the partner's pixels replace those in its box.
    """

    partners: np.ndarray  # int64 [B]: their numbers in the batch
    weights: np.ndarray  # float32 [2, B]: of image and partner; 1 and 0 with CutMix
    boxes: np.ndarray  # int64 [B, 4]: top, left, height, width; zeros without CutMix
    fractions: np.ndarray  # float32 [2, B]: of the targets of image and partner

    def mix(self, images: torch.Tensor, threads: int = 1) -> None:
        """Mix images [B, C, H, W] in place, on any device; on the CPU float32 by compiled code, on `threads`."""
        pixels = images.movedim(1, -1)
        if images.device.type == "cpu" and pixels.is_contiguous():
            rows = pixels.flatten(2).numpy()
            run_on_threads(partial(_mix_pairs, rows, self.partners, self.weights, self.boxes), threads)
            return
        partners = torch.from_numpy(self.partners).to(images.device)
        originals = images.movedim(1, -1)[partners].movedim(-1, 1)  # stay channels last
        if self.weights[1].any():
            own, other = torch.from_numpy(self.weights).to(images.device)[..., None, None, None]
            images.mul_(own).add_(originals * other)
        for (top, left, height, width), equal in groupby(enumerate(self.boxes.tolist()), lambda each: each[1]):
            b, *rest = (number for number, _ in equal)
            box = slice(b, b + 1 + len(rest)), slice(None), slice(top, top + height), slice(left, left + width)
            images[box] = originals[box]

    def mix_targets(self, targets: torch.Tensor) -> torch.Tensor:
        """The targets [B, classes] of the mixtures, from those of the images."""
        own, other = torch.from_numpy(self.fractions).to(targets.device)[..., None]
        return targets * own + targets[torch.from_numpy(self.partners).to(targets.device)] * other


@jit
def _mix_pairs(images, partners, weights, boxes, chunk, chunks):
    """`Mixture.mix` of every `chunks`-th pair of images float32 [B, H, 3 W], from `chunk` on."""
    own, other = np.empty_like(images[0, 0]), np.empty_like(images[0, 0])
    for b in range(chunk, len(images), chunks):
        partner = partners[b]
        if partner < b:  # which has mixed this one too
            continue
        for y in range(images.shape[1]):
            own[:], other[:] = images[b, y], images[partner, y]
            _mix_row(images[b, y], own, other, weights[:, b], boxes[b], y)
            _mix_row(images[partner, y], other, own, weights[:, partner], boxes[partner], y)


@jit_noalias
def _mix_row(row, own, other, weights, box, y):
    for i in range(row.size):
        row[i] = own[i] * weights[0] + other[i] * weights[1]
    if box[0] <= y < box[0] + box[2]:
        for i in range(3 * box[1], 3 * (box[1] + box[3])):
            row[i] = other[i]


def sample_mixture(count: int, side: int, section: AugmentSection, seed: int, step: int, first_group: int) -> Mixture:
    """Sample how to mix `count` images of `side` pixels, whole groups from `first_group` of the global batch on."""
    size = section.mix_group
    sample = _sample_group if section.mix_mode == "batch" else _sample_each
    groups, numbers = [], np.random.RandomState(np.random.MT19937(0))
    for number in range(count // size):
        # Another generator would first ask the system for entropy, a hundred times as long as to be seeded again.
        numbers.seed(key(seed, step, first_group + number, MIX) & 0xFFFFFFFF)
        groups.append(sample(size, side, section, numbers))
    weights, boxes, fractions = zip(*groups, strict=True)
    partners = np.arange(count).reshape(-1, size)[:, ::-1].flatten()
    return Mixture(
        partners, np.concatenate(weights, axis=1), np.concatenate(boxes), np.concatenate(fractions, axis=1)
    )


def soft_labels(labels: torch.Tensor, classes: int, smoothing: float) -> torch.Tensor:
    """Labels int64 [B] to probabilities [B, classes], with label smoothing spread over all classes."""
    off = smoothing / classes
    targets = torch.full((len(labels), classes), off, dtype=torch.float32, device=labels.device)
    return targets.scatter_(1, labels[:, None], 1.0 - smoothing + off)


_Sampled = tuple[np.ndarray, np.ndarray, np.ndarray]  # weights, boxes and fractions of a group


def _sample_group(size: int, side: int, section: AugmentSection, numbers: np.random.RandomState) -> _Sampled:
    """One mixture for all images of the group."""
    fraction, cut, box = 1.0, False, (0, 0, 0, 0)
    if numbers.rand() < section.mixup_prob:
        both = section.mixup > 0 and section.cut_alpha > 0
        cut = numbers.rand() < section.mixup_switch_prob if both else section.cut_alpha > 0
        alpha = section.cut_alpha if cut else section.mixup
        fraction = float(numbers.beta(alpha, alpha))
        if cut and fraction != 1:
            box, fraction = _sample_box(side, fraction, section, numbers)
    fractions = np.broadcast_to(np.array([[fraction], [1 - fraction]], np.float32), (2, size))
    weights = np.broadcast_to(np.array([[1], [0]], np.float32), (2, size)) if cut else fractions
    return weights, np.broadcast_to(np.array(box), (size, 4)), fractions


def _sample_each(size: int, side: int, section: AugmentSection, numbers: np.random.RandomState) -> _Sampled:
    """A mixture for each image or each pair."""
    pair = section.mix_mode == "pair"
    fractions, cut = _sample_fractions(size // 2 if pair else size, section, numbers)
    weights, boxes = np.where(cut, np.float32(1), fractions), np.zeros((len(fractions), 4), np.int64)
    for i in np.flatnonzero(cut & (fractions != 1)):
        boxes[i], fractions[i] = _sample_box(side, fractions[i], section, numbers)
    if pair:
        weights, boxes, fractions = (np.concatenate([half, half[::-1]]) for half in (weights, boxes, fractions))
    return np.stack([weights, 1 - weights]), boxes, np.stack([fractions, 1 - fractions])


def _sample_fractions(
    size: int, section: AugmentSection, numbers: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """float32 fractions [size], and which of them are CutMix: bool [size]."""
    cut = np.full(size, section.cut_alpha > 0)
    if section.mixup > 0 and section.cut_alpha > 0:
        cut = numbers.rand(size) < section.mixup_switch_prob
        cuts = numbers.beta(section.cut_alpha, section.cut_alpha, size)
        fractions = np.where(cut, cuts, numbers.beta(section.mixup, section.mixup, size))
    else:
        alpha = section.cut_alpha or section.mixup
        fractions = numbers.beta(alpha, alpha, size)
    mixed = numbers.rand(size) < section.mixup_prob
    return np.where(mixed, fractions, 1.0).astype(np.float32), cut


def _sample_box(
    side: int, fraction: float, section: AugmentSection, numbers: np.random.RandomState
) -> tuple[tuple[int, int, int, int], float]:
    """The box to replace (top, left, height, width), and the fraction of the image outside of it."""
    if section.cutmix_minmax is not None:
        least, greatest = (int(side * part) for part in section.cutmix_minmax)
        height, width = numbers.randint(least, greatest), numbers.randint(least, greatest)
        top, left = numbers.randint(0, side - height + 1), numbers.randint(0, side - width + 1)
    else:
        cut = int(side * np.sqrt(1 - fraction))
        y, x = numbers.randint(0, side), numbers.randint(0, side)
        top, bottom = np.clip([y - cut // 2, y + (cut + 1) // 2], 0, side)
        left, right = np.clip([x - cut // 2, x + (cut + 1) // 2], 0, side)
        height, width = bottom - top, right - left
    return (int(top), int(left), int(height), int(width)), 1.0 - float(height * width) / side**2
