"""Random erasing (Zhong et al. 2017) with timm's law of boxes, each picture drawing from its own key."""

import math
import random
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

MIN_AREA, MAX_AREA = 0.02, 1 / 3
LOG_ASPECT = (math.log(0.3), math.log(1 / 0.3))


def boxes(draw: random.Random, side: int, prob: float, count: int) -> list[tuple[int, int, int, int]]:
    """Boxes (top, left, height, width) to erase from one picture, in timm's order of draws."""
    found: list[tuple[int, int, int, int]] = []
    if draw.random() > prob:
        return found
    count = 1 if count == 1 else draw.randint(1, count)
    for _ in range(count):
        for _attempt in range(10):
            area = draw.uniform(MIN_AREA, MAX_AREA) * side * side / count
            aspect = math.exp(draw.uniform(*LOG_ASPECT))
            h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if w < side and h < side:
                found.append((draw.randint(0, side - h), draw.randint(0, side - w), h, w))
                break
    return found


def erase(
    images: torch.Tensor,
    streams: Sequence[int],
    prob: float,
    count: int,
    mode: Literal["const", "rand", "pixel"],
) -> None:
    """Erase boxes of normalised pictures [B, C, side, side] in place; `streams[b]` seeds picture b's numbers."""
    channels, side = images.shape[1], images.shape[-1]
    for image, stream in zip(images, streams, strict=True):
        for top, left, h, w in boxes(random.Random(stream), side, prob, count):
            region = image[:, top : top + h, left : left + w]
            if mode == "const":
                region.zero_()
                continue
            noise = np.random.Generator(np.random.SFC64([stream, top * side + left]))
            shape = (h, w, channels) if mode == "pixel" else (1, 1, channels)  # in the order of memory
            fill = torch.from_numpy(noise.standard_normal(shape, np.float32)).permute(2, 0, 1).to(images.dtype)
            region.copy_(fill.to(images.device, non_blocking=True).expand_as(region))
