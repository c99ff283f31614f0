"""Normalisation of uint8 images to the model's float32 inputs."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from widemix.data.compiled import jit, jit_noalias


def empty_host(shape: tuple[int, ...], kind: type[np.generic]) -> torch.Tensor:
    """`torch.empty` on the host, by NumPy, which asks for huge pages: allocating them takes a quarter of the time."""
    return torch.from_numpy(np.empty(math.prod(shape), kind)).view(shape)


def per_channel(values: Sequence[float]) -> torch.Tensor:
    """Values of the channels on a scale of 0 to 1 as float32 [3, 1, 1] on the host, on a scale of 0 to 255.

    By NumPy, as torch's default type and device, which a program may have changed, do not reach it.
    """
    return torch.from_numpy(255 * np.array(values, np.float32))[:, None, None]


def normalise(
    images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, to: torch.Tensor | None = None
) -> torch.Tensor:
    """uint8 [B, H, W, 3] on the host to float32 [B, 3, H, W] on the device of `mean`, channels last in memory.

    (value - mean) / std, with mean and std float32 [3, 1, 1] on a scale of 0 to 255. They are written to `to`,
    float32 [B, H, W, 3] there, if it is given. Compiled on the CPU: one pass over memory instead of torch's three.
    """
    if mean.device.type == "cpu":
        to = empty_host(tuple(images.shape), np.float32) if to is None else to
        width = images.shape[2]
        means, stds = (np.tile(channels.numpy().reshape(-1), width) for channels in (mean, std))
        _normalise_rows(images.numpy().reshape(-1, 3 * width), means, stds, to.numpy().reshape(-1, 3 * width))
        return to.permute(0, 3, 1, 2)
    return normalise_with_torch(images, mean, std, to)


def normalise_with_torch(
    images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, to: torch.Tensor | None = None
) -> torch.Tensor:
    """`normalise` on any device, bit for bit; bytes are transferred, not floats."""
    images = images.to(mean.device, non_blocking=True)
    to = torch.empty_like(images, dtype=torch.float32) if to is None else to
    return to.copy_(images).permute(0, 3, 1, 2).sub_(mean).div_(std)


@jit
def _normalise_rows(rows, means, stds, out):
    for y in range(len(rows)):
        _normalise_row(rows[y], means, stds, out[y])


@jit_noalias
def _normalise_row(row, means, stds, out):
    for i in range(out.size):
        out[i] = (np.float32(row[i]) - means[i]) / stds[i]
