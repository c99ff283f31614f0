"""uint8 pictures to the numbers that the model sees."""

import math

import numpy as np
import torch

from pipeline.data.compiled import jit, pixels


def fresh(shape: tuple[int, ...], kind: type[np.generic]) -> torch.Tensor:
    """Uninitialised memory on the host. NumPy asks for huge pages, torch does not: new ones then cost a quarter."""
    return torch.from_numpy(np.empty(math.prod(shape), kind)).view(shape)


def normalised(pictures: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """uint8 [B, H, W, 3] on the host to float32 [B, 3, H, W] on the device of `mean`, channels last in memory.

    (value - mean) / std, mean and std float32 [3, 1, 1] on a scale of 0 to 255. On the CPU compiled, in one pass
    over memory instead of three.
    """
    if mean.device.type == "cpu":
        images = fresh(tuple(pictures.shape), np.float32)
        width = pictures.shape[2]
        means, stds = (np.tile(channels.numpy().reshape(-1), width) for channels in (mean, std))
        _normalise(pictures.numpy().reshape(-1, 3 * width), means, stds, images.numpy().reshape(-1, 3 * width))
        return images.permute(0, 3, 1, 2)
    return normalised_by_torch(pictures, mean, std)


def normalised_by_torch(pictures: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """The same numbers on any device: what goes over to it are bytes."""
    images = pictures.to(mean.device, non_blocking=True).permute(0, 3, 1, 2)
    return images.to(torch.float32, copy=True).sub_(mean).div_(std)


@jit
def _normalise(rows, means, stds, out):
    for y in range(len(rows)):
        _normalise_row(rows[y], means, stds, out[y])


@pixels
def _normalise_row(row, means, stds, out):
    for i in range(out.size):
        out[i] = (np.float32(row[i]) - means[i]) / stds[i]
