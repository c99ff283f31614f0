"""The last steps of a batch of images, on the device: normalise, erase, mix and round.

On the CPU they are compiled code, one after the other. On a GPU a kernel in Triton does all of them in one pass over
the numbers, bit for bit what PyTorch's operators give. Its speed is not measured.
"""

import functools
import sys
from types import ModuleType
from typing import Any

import torch

from widemix.data.augment.erase import Erasing, erase
from widemix.data.mixup import Mixture
from widemix.data.normalise import normalise, per_channel
from widemix.recipe.data import DataSection
from widemix.terminal import print


class Finish:
    """Finishes the images of a data section on a device.

    The first batch on a GPU is computed in both ways. If the kernel fails or has other numbers than PyTorch, a
    warning says so, and PyTorch computes the other batches too.
    """

    def __init__(self, section: DataSection, device: torch.device, kernel: Any = None):
        """`kernel`: what has a `finish` like `finish_in_steps`; on a GPU by default `by_triton`."""
        self._made_of = section, device, kernel
        # Multiplied on the host: on the device it would be in the stream of this thread, for which no other waits.
        self._mean, self._std = (per_channel(of).to(device) for of in (section.mean, section.std))
        self._kernel = by_triton() if kernel is None and device.type == "cuda" else kernel
        self._checked = False

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle checks its kernel again, on its own machine."""
        return Finish, self._made_of

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
            return finish_in_steps(*arguments, to)
        if self._checked:
            return self._kernel.finish(*arguments, to)
        images, self._checked = finish_in_steps(*arguments, to), True
        if wrong := _fault(self._kernel, arguments, images):
            print(
                f"warning: the kernel that normalises, erases and mixes images on {images.device} is not used: "
                f"{wrong}; PyTorch does it, with the same numbers",
                file=sys.stderr,
            )
            self._kernel = None
        return images


def finish_in_steps(
    pixels: torch.Tensor,
    mean: torch.Tensor,
    std: torch.Tensor,
    dtype: torch.dtype,
    erasing: Erasing | None,
    mixture: Mixture | None,
    to: torch.Tensor | None = None,
) -> torch.Tensor:
    """As a `Finish`, on the device of mean and std, float32 [3, 1, 1] on a scale of 0 to 255."""
    images = normalise(pixels, mean, std, to)
    if erasing is not None:
        erase(images, erasing)
    if mixture is not None:
        mixture.mix(images)
    return images.to(dtype)


def _fault(kernel: ModuleType, arguments: tuple, images: torch.Tensor) -> str | None:
    """What is wrong with the kernel, which is to give these images."""
    try:
        same = torch.equal(kernel.finish(*arguments), images)
    except Exception as error:  # Triton, its compilers and the driver have their own
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None if same else "its numbers are not PyTorch's"


@functools.cache
def by_triton() -> ModuleType | None:
    """The kernel's module, with a `finish` like `finish_in_steps`; None where Triton is missing."""
    try:
        from widemix.data import finish_by_triton
    except ImportError:
        return None
    return finish_by_triton
