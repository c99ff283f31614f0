"""Random erasing (Zhong et al. 2017) with timm's distribution of boxes, keyed by view id.

Noise is sampled on the host from a table of the normal distribution's quantiles: it is the same on every device.
"""

import functools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy.special import ndtri

from widemix.data.compiled import jit
from widemix.data.random import ERASE, key, scramble, uniform
from widemix.recipe.augment import AugmentSection

_MIN_AREA, _MAX_AREA = 0.02, 1 / 3
_LOW, _HIGH = math.log(0.3), math.log(1 / 0.3)  # of the aspect
LEVELS = 1 << 12
Mode = Literal["const", "rand", "pixel"]
_NOISE = 1 << 20  # first counter of an image's noise
COUNTERS = 1 << 14  # of a row: four numbers each


@dataclass(frozen=True)
class Erasing:
    """The boxes of a batch of images to erase, and how."""

    boxes: np.ndarray  # int64 [n, 5]: image, top, left, height, width; in the order of the images
    streams: np.ndarray  # uint64 [n]: of the boxes' random numbers
    mode: Mode


def sample_erasing(view_ids: np.ndarray, side: int, section: AugmentSection, seed: int, epoch: int) -> Erasing:
    """Sample the boxes of images of `side` pixels, by the section's `re_` keys."""
    boxes, streams = sample_boxes(view_ids, seed, epoch, side, section.re_prob, section.re_count)
    return Erasing(boxes, streams, section.re_mode)


def erase(images: torch.Tensor, erasing: Erasing) -> None:
    """Erase boxes of normalised images float32 [B, 3, side, side] in place.

    Mode const fills with zeros, rand with one standard normal colour a box, pixel with standard normal noise. On the
    CPU, where it is compiled, pixels are channels last in memory.
    """
    if images.device.type == "cpu":
        pixels, mode = images.permute(0, 2, 3, 1).numpy(), erasing.mode
        _erase(pixels, erasing.boxes, erasing.streams, mode == "const", mode == "pixel", normal_quantiles())
    else:
        erase_with_torch(images, erasing)


def erase_with_torch(images: torch.Tensor, erasing: Erasing) -> None:
    """`erase` on any device: the same numbers."""
    boxes = erasing.boxes
    shapes = boxes[:, 3:] if erasing.mode == "pixel" else np.ones((len(boxes), 2), np.int64)
    sizes = 3 * shapes[:, 0] * shapes[:, 1]
    noise = np.zeros(sizes.sum(), np.float32)
    if erasing.mode != "const":
        fill_noise(noise, shapes, erasing.streams, normal_quantiles())
    values = torch.from_numpy(noise).to(images.device, non_blocking=True)
    for (b, top, left, height, width), shape, fill in zip(
        boxes.tolist(), shapes.tolist(), values.split(sizes.tolist()), strict=True
    ):
        region = images[b, :, top : top + height, left : left + width]
        region.copy_(fill.view(*shape, 3).permute(2, 0, 1).expand_as(region))  # to channels first


@jit
def _erase(images, boxes, streams, zero, noisy, quantiles):
    """Images [B, side, side, 3]."""
    rows = images.reshape(len(images), images.shape[1], -1)
    for n in range(len(boxes)):
        b, top, left, height, width = boxes[n]
        box = rows[b, top : top + height, 3 * left : 3 * (left + width)]
        if noisy:
            for y in range(height):
                _fill_normal(box[y], _row(streams[n], y), quantiles)
            continue
        box[0, :3] = 0
        if not zero:
            _fill_normal(box[0, :3], streams[n], quantiles)
        for y in range(height):
            for i in range(box.shape[1]):
                box[y, i] = box[0, i % 3]


@jit
def sample_boxes(view_ids, seed, epoch, side, prob, count):
    """int64 [n, 5] of (image, top, left, height, width), sampled in timm's order, and their streams, uint64 [n]."""
    boxes, streams = np.empty((len(view_ids) * count, 5), np.int64), np.empty(len(view_ids) * count, np.uint64)
    found = 0
    for b in range(len(view_ids)):
        stream = key(seed, epoch, view_ids[b], ERASE)
        if uniform(stream, 0) > prob:
            continue
        wanted = 1 if count == 1 else 1 + int(uniform(stream, 1) * count)
        at = 1 if count == 1 else 2
        for _ in range(wanted):
            for _attempt in range(10):
                area = (_MIN_AREA + (_MAX_AREA - _MIN_AREA) * uniform(stream, at)) * side * side / wanted
                aspect = math.exp(_LOW + (_HIGH - _LOW) * uniform(stream, at + 1))
                h, w = int(np.rint(math.sqrt(area * aspect))), int(np.rint(math.sqrt(area / aspect)))
                at += 2
                if w < side and h < side:
                    boxes[found, 0], boxes[found, 3], boxes[found, 4] = b, h, w
                    boxes[found, 1] = int(uniform(stream, at) * (side - h + 1))
                    boxes[found, 2] = int(uniform(stream, at + 1) * (side - w + 1))
                    streams[found] = scramble(stream + np.uint64(_NOISE + at))
                    at += 2
                    found += h * w > 0  # in a small image a side may round to 0: nothing is erased, as by timm
                    break
    return boxes[:found], streams[:found]


@jit
def fill_noise(noise, shapes, streams, quantiles):
    """Fill float32 noise, one box after the other: shapes int64 [n, 2] of (height, width), streams uint64 [n]."""
    start = 0
    for n in range(len(shapes)):
        for y in range(shapes[n, 0]):
            end = start + 3 * shapes[n, 1]
            _fill_normal(noise[start:end], _row(streams[n], y), quantiles)
            start = end


@jit
def _row(stream, y):
    """The random stream of a row of a box."""
    return stream + np.uint64(COUNTERS * y)


@jit
def _fill_normal(values, stream, quantiles):
    """Fill values with normal random numbers, four from 64 bits."""
    whole = values.size // 4
    for i in range(whole):
        bits = scramble(stream + np.uint64(i))
        for k in range(4):
            values[4 * i + k] = quantiles[(bits >> np.uint64(16 * k)) & np.uint64(LEVELS - 1)]
    bits = scramble(stream + np.uint64(whole))
    for i in range(4 * whole, values.size):
        values[i] = quantiles[bits & np.uint64(LEVELS - 1)]
        bits >>= np.uint64(16)


@functools.cache
def normal_quantiles() -> np.ndarray:
    """float32 [4096]: the medians of as many equally likely parts of the normal distribution, scaled to variance 1.

    The table is no larger so that it fits into a core's first-level cache.
    """
    levels = ndtri((np.arange(LEVELS) + 0.5) / LEVELS)
    return (levels / levels.std()).astype(np.float32)
