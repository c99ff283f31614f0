"""The last steps of a batch of images, on the device: normalise, erase, mix and round; and the order of pixels.

On the CPU they are compiled code, one after the other. On a GPU a kernel in Triton does all of them in one pass over
the numbers, bit for bit what PyTorch's operators give. Its speed is not measured.

Images with their pixels in another order (Tolstikhin et al. 2021, section 3.4 and figure 4) get it here, after
augmentation and mixup, so that nothing else is different.
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from widemix.data.augment.erase import Erasing, erase
from widemix.data.compiled import jit, jit_noalias, run_on_threads
from widemix.data.mixup import Mixture
from widemix.recipe.data import AnyDataSection, DataSection
from widemix.terminal import print

Kernel = Callable[..., torch.Tensor]  # computes what `normalise_and_mix` does


class NormaliseAndMix:
    """Normalises, erases, mixes and rounds the images of a data section on a device.

    The first batch on a GPU is computed in both ways. If the kernel fails or has other numbers than PyTorch, a
    warning says so, and PyTorch computes the other batches too.
    """

    def __init__(self, section: DataSection, device: torch.device, kernel: Kernel | None = None, threads: int = 1):
        """`kernel`: on a GPU by default `by_triton`. `threads`: of the CPU, where the images stay there."""
        self._made_of, self._threads = (section, device, kernel, threads), threads
        # Multiplied on the host: on the device it would be in the stream of this thread, for which no other waits.
        self._mean, self._std = (per_channel(of).to(device) for of in (section.mean, section.std))
        self._kernel = by_triton() if kernel is None and device.type == "cuda" else kernel
        self._checked = False

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle checks its kernel again, on its own machine."""
        return NormaliseAndMix, self._made_of

    def __call__(
        self,
        pixels: torch.Tensor,
        dtype: torch.dtype = torch.float32,
        erasing: Erasing | None = None,
        mixture: Mixture | None = None,
        to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """uint8 [B, side, side, 3] on the host to [B, 3, side, side] on the device, channels last in memory.

        They are written to `to`, [B, side, side, 3] on the device, if it is given; then dtype is float32.
        """
        arguments = pixels, self._mean, self._std, dtype, erasing, mixture
        if self._kernel is None or len(pixels) == 0:
            return normalise_and_mix(*arguments, to, self._threads)
        if self._checked:
            return self._kernel(*arguments, to)
        images, self._checked = normalise_and_mix(*arguments, to), True
        if wrong := _fault(self._kernel, arguments, images):
            print(
                f"warning: the kernel that normalises, erases and mixes images on {images.device} is not used: "
                f"{wrong}; PyTorch does it, with the same numbers",
                file=sys.stderr,
            )
            self._kernel = None
        return images


def normalise_and_mix(
    pixels: torch.Tensor,
    mean: torch.Tensor,
    std: torch.Tensor,
    dtype: torch.dtype,
    erasing: Erasing | None,
    mixture: Mixture | None,
    to: torch.Tensor | None = None,
    threads: int = 1,
) -> torch.Tensor:
    """`NormaliseAndMix` in steps, on the device of mean and std, float32 [3, 1, 1] on a scale of 0 to 255."""
    images = normalise(pixels, mean, std, to, threads)
    if erasing is not None:
        erase(images, erasing)
    if mixture is not None:
        mixture.mix(images, threads)
    if images.device.type != "cpu" or dtype == images.dtype:
        return images.to(dtype)
    return empty_host((len(images), *images.shape[2:], 3), np.int16).view(dtype).permute(0, 3, 1, 2).copy_(images)


def _fault(kernel: Kernel, arguments: tuple, images: torch.Tensor) -> str | None:
    """Return why the kernel, which is to give these images, is not used; None if it does."""
    try:
        same = torch.equal(kernel(*arguments), images)
    except Exception as error:  # Triton, its compilers and the driver have their own
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None if same else "its numbers are not PyTorch's"


@functools.cache
def by_triton() -> Kernel | None:
    """Return the kernel; None where Triton is missing."""
    try:
        from widemix.data.normalise_and_mix_triton import normalise_and_mix_at_once
    except ImportError:
        return None
    return normalise_and_mix_at_once


def empty_host(shape: tuple[int, ...], kind: type[np.generic]) -> torch.Tensor:
    """`torch.empty` on the host, by NumPy, which asks for huge pages: allocating them takes a quarter of the time."""
    return torch.from_numpy(np.empty(math.prod(shape), kind)).view(shape)


def per_channel(values: Sequence[float]) -> torch.Tensor:
    """Values of the channels on a scale of 0 to 1 as float32 [3, 1, 1] on the host, on a scale of 0 to 255.

    By NumPy, as torch's default type and device, which a program may have changed, do not reach it.
    """
    return torch.from_numpy(255 * np.array(values, np.float32))[:, None, None]


def normalise(
    images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, to: torch.Tensor | None = None, threads: int = 1
) -> torch.Tensor:
    """uint8 [B, H, W, 3] on the host to float32 [B, 3, H, W] on the device of `mean`, channels last in memory.

    (value - mean) / std, with mean and std float32 [3, 1, 1] on a scale of 0 to 255. They are written to `to`,
    float32 [B, H, W, 3] there, if it is given. Compiled on the CPU: one pass over memory instead of torch's three.
    """
    if mean.device.type == "cpu":
        to = empty_host(tuple(images.shape), np.float32) if to is None else to
        width = images.shape[2]
        means, stds = (np.tile(channels.numpy().reshape(-1), width) for channels in (mean, std))
        rows, normalised = (each.numpy().reshape(-1, 3 * width) for each in (images, to))
        run_on_threads(functools.partial(_normalise_rows, rows, means, stds, normalised), threads)
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
def _normalise_rows(rows, means, stds, out, chunk, chunks):
    for y in range(chunk, len(rows), chunks):
        _normalise_row(rows[y], means, stds, out[y])


@jit_noalias
def _normalise_row(row, means, stds, out):
    for i in range(out.size):
        out[i] = (np.float32(row[i]) - means[i]) / stds[i]


def pixel_permutation(section: AnyDataSection, device: torch.device) -> torch.Tensor | None:
    """Return which pixel stands at each place of an image, row by row: int64 [H W]; None for the original order.

    With pixel_order `patches` the patches are permuted, and the pixels within every patch by one other permutation.
    """
    if not isinstance(section, DataSection) or section.pixel_order == "original":
        return None
    side, patch = section.image_size, section.pixel_patch
    numbers = np.random.RandomState(section.pixel_seed)  # its stream is the same in every version of NumPy
    if section.pixel_order == "all":
        order = numbers.permutation(side * side)
    else:
        across = side // patch
        places = np.arange(side * side).reshape(across, patch, across, patch).swapaxes(1, 2)
        patches = places.reshape(across**2, patch**2)
        shuffled = patches[numbers.permutation(across**2)][:, numbers.permutation(patch**2)]
        order = shuffled.reshape(across, across, patch, patch).swapaxes(1, 2).reshape(-1)
    return torch.from_numpy(order).to(device)


def permute_pixels(images: torch.Tensor, permutation: torch.Tensor | None) -> torch.Tensor:
    """Return images [B, C, H, W], channels last, with their pixels in the order of `permutation`, int64 [H W].

    With None the images themselves.
    """
    if permutation is None:
        return images
    b, c, h, w = images.shape
    pixels = images.permute(0, 2, 3, 1).reshape(b, h * w, c)
    return pixels.index_select(1, permutation).view(b, h, w, c).permute(0, 3, 1, 2)
