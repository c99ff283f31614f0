"""Random erasing (Zhong et al. 2017) with timm's law of boxes, each picture drawing from its own key.

Noise is drawn on the host by a table of the normal distribution's quantiles, so that it is the same on every device.
"""

import functools
import math
from typing import Literal

import numpy as np
import torch
from scipy.special import ndtri

from pipeline.data.compiled import jit
from pipeline.data.random import ERASE, key, scramble, uniform

_MIN_AREA, _MAX_AREA = 0.02, 1 / 3
_LOW, _HIGH = math.log(0.3), math.log(1 / 0.3)  # of the aspect
_LEVELS = 1 << 12
Mode = Literal["const", "rand", "pixel"]
_NOISE = 1 << 20  # first counter of a picture's noise
_COUNTERS = 1 << 14  # of a row: four numbers each


def erase(
    images: torch.Tensor, samples: np.ndarray, seed: int, epoch: int, prob: float, count: int, mode: Mode
) -> None:
    """Erase boxes of normalised pictures float32 [B, 3, side, side], which show `samples`, in place.

    With zeros (const), one standard normal colour a box (rand), or standard normal noise (pixel). Channels last in
    memory on the CPU, where it is compiled.
    """
    boxes, streams = draw_boxes(samples, seed, epoch, images.shape[-1], prob, count)
    if images.device.type == "cpu":
        pictures = images.permute(0, 2, 3, 1).numpy()
        _erase(pictures, boxes, streams, mode == "const", mode == "pixel", normal_quantiles())
    else:
        erase_with_torch(images, boxes, streams, mode)


def erase_with_torch(images: torch.Tensor, boxes: np.ndarray, streams: np.ndarray, mode: Mode) -> None:
    """The same numbers on any device."""
    shapes = boxes[:, 3:] if mode == "pixel" else np.ones((len(boxes), 2), np.int64)
    sizes = 3 * shapes[:, 0] * shapes[:, 1]
    noise = np.zeros(sizes.sum(), np.float32)
    if mode != "const":
        fill_noise(noise, shapes, streams, normal_quantiles())
    values = torch.from_numpy(noise).to(images.device, non_blocking=True)
    for (b, top, left, height, width), shape, fill in zip(
        boxes.tolist(), shapes.tolist(), values.split(sizes.tolist()), strict=True
    ):
        region = images[b, :, top : top + height, left : left + width]
        region.copy_(fill.view(*shape, 3).permute(2, 0, 1).expand_as(region))  # in the order of memory


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
def draw_boxes(samples, seed, epoch, side, prob, count):
    """int64 [n, 5] (picture, top, left, height, width) in timm's order of draws, and uint64 [n], their streams."""
    boxes, streams = np.empty((len(samples) * count, 5), np.int64), np.empty(len(samples) * count, np.uint64)
    found = 0
    for b in range(len(samples)):
        stream = key(seed, epoch, samples[b], ERASE)
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
                    found += 1
                    break
    return boxes[:found], streams[:found]


@jit
def fill_noise(noise, shapes, streams, quantiles):
    """Fill float32 noise with one box after the other: int64 shapes [n, 2], height and width, and their streams."""
    start = 0
    for n in range(len(shapes)):
        for y in range(shapes[n, 0]):
            end = start + 3 * shapes[n, 1]
            _fill_normal(noise[start:end], _row(streams[n], y), quantiles)
            start = end


@jit
def _row(stream, y):
    """What the numbers of a box's row are drawn from."""
    return stream + np.uint64(_COUNTERS * y)


@jit
def _fill_normal(values, stream, quantiles):
    """Four numbers from 64 bits."""
    whole = values.size // 4
    for i in range(whole):
        bits = scramble(stream + np.uint64(i))
        for k in range(4):
            values[4 * i + k] = quantiles[(bits >> np.uint64(16 * k)) & np.uint64(_LEVELS - 1)]
    bits = scramble(stream + np.uint64(whole))
    for i in range(4 * whole, values.size):
        values[i] = quantiles[bits & np.uint64(_LEVELS - 1)]
        bits >>= np.uint64(16)


@functools.cache
def normal_quantiles() -> np.ndarray:
    """float32 [4096]: the middles of as many equally likely parts of the normal distribution, of variance 1.

    No more of them, so that they stay in a core's first cache.
    """
    levels = ndtri((np.arange(_LEVELS) + 0.5) / _LEVELS)
    return (levels / levels.std()).astype(np.float32)
